"""Grouped expert MLPs: experts with many tokens, one, and none; tiles that are part empty.

The interpreter multiplies no bfloat16 matrices.
"""

import pytest
import torch

from kernels import experts
from kernels.gpu import Gpu
from kernels.gpu import experts as gpu_experts
from tests.fake_cuda import no_look_at_the_device

TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3}


def make(tokens, num_experts, per_token, hidden, inner, dtype):
    def random(*shape):
        return (torch.randn(shape) * shape[-1] ** -0.5).to(dtype)

    x = torch.randn(tokens, hidden).to(dtype)
    scores = torch.randn(tokens, num_experts)
    scores[:, 0] += 3.0  # most go to the first
    scores[:, 1] = -9.0  # none goes to the second
    weights, chosen = scores.softmax(-1).topk(per_token)
    return x, random(num_experts, 2 * inner, hidden), random(num_experts, hidden, inner), chosen, weights.to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("tokens", "num_experts", "per_token", "hidden", "inner"),
    [(1, 4, 2, 64, 48), (7, 8, 3, 80, 33), (40, 5, 2, 130, 96), (300, 3, 1, 32, 64), (600, 6, 2, 32, 16)],
)
def test_grouped_experts_equal_every_expert_over_every_token(tokens, num_experts, per_token, hidden, inner, dtype):
    given = make(tokens, num_experts, per_token, hidden, inner, dtype)
    gelu = (tokens % 2 == 0) == (dtype is torch.float32)  # each with each shape and each type, once
    with no_look_at_the_device():
        found = gpu_experts.experts_mlp(*given, gelu, Gpu((9, 0), 132))
    expected = experts.reference(*(t if t.dtype is torch.int64 else t.float() for t in given), gelu)
    torch.testing.assert_close(found.float(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_rows_with_a_stride_and_no_rows_at_all():
    x, gate_up, down, chosen, weights = make(9, 4, 2, 64, 48, torch.float32)
    wide = torch.cat((x, torch.full((9, 10), torch.nan)), dim=1)
    found = gpu_experts.experts_mlp(wide[:, :64], gate_up, down, chosen, weights, False, Gpu((8, 6), 20))
    torch.testing.assert_close(found, experts.reference(x, gate_up, down, chosen, weights, False))
    none = gpu_experts.experts_mlp(x[:0], gate_up, down, chosen[:0], weights[:0], False, Gpu((8, 6), 20))
    assert none.shape == (0, 64)
