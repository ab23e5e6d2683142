"""Norms, activation, masks and penalties.

The interpreter cuts float32 to bfloat16 where a GPU rounds to the nearest: bfloat16 is compared to within two of its
steps.
"""

import pytest
import torch

from kernels import activation, bitmask, rms_norm, sampler
from kernels.gpu import activation as gpu_activation
from kernels.gpu import logits as gpu_logits
from kernels.gpu import norm

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 2**-5}


def close(got, expected):
    assert got.dtype is expected.dtype
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.float(), expected.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("n", [64, 577])
def test_rms_norm_with_and_without_the_residual(n, dtype):
    x, residual, weight = torch.randn(5, n).to(dtype), torch.randn(5, n).to(dtype), torch.randn(n).to(dtype)
    before = x.clone(), residual.clone()
    close(norm.rms_norm(x, weight, 1e-5), rms_norm.reference(x, weight, 1e-5))
    for got, expected in zip(
        norm.add_rms_norm(x, residual, weight, 1e-5), rms_norm.add_reference(x, residual, weight, 1e-5), strict=True
    ):
        close(got, expected)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


def test_rms_norm_takes_heads_of_a_fused_projection_and_no_rows():
    heads, weight = torch.randn(4, 9, 80)[:, 3:6], torch.randn(80)
    close(norm.rms_norm(heads, weight, 1e-6), rms_norm.reference(heads, weight, 1e-6))
    assert norm.rms_norm(torch.zeros(0, 8), torch.ones(8), 1e-6).shape == (0, 8)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("n", [64, 1030])
def test_silu_and_gelu_times_up(n, dtype):
    x = (torch.randn(3, 2 * n) * 5).to(dtype)
    close(gpu_activation.silu_and_mul(x), activation.reference(x))
    close(gpu_activation.gelu_and_mul(x), activation.gelu_reference(x))


def test_silu_of_extreme_values_is_finite():
    x = torch.tensor([[-1e30, -200.0, 0.0, 1e30, 1.0, 1.0, 1.0, 1.0]])
    assert torch.equal(gpu_activation.silu_and_mul(x), activation.reference(x))
    assert gpu_activation.gelu_and_mul(x.clamp(-1e9, 1e9)).isfinite().all()


@pytest.mark.parametrize("vocab", [31, 4100])
@pytest.mark.parametrize("rows", [None, torch.tensor([3, 1])])
def test_bitmask(vocab, rows):
    logits = torch.randn(2 if rows is None else 5, vocab)
    logits[0, 3] = float("nan")
    mask = torch.randint(-(2**31), 2**31, (2, -(-vocab // 32)), dtype=torch.int32)
    expected = logits.clone()
    bitmask.reference(expected, mask, rows)
    gpu_logits.apply_bitmask(logits, mask, rows)
    torch.testing.assert_close(logits, expected, rtol=0, atol=0, equal_nan=True)


def test_penalties_change_only_their_rows_and_the_tokens_that_were_there():
    logits = torch.randn(5, 4100)
    seen = torch.randint(0, 8, (4, 4100), dtype=torch.int32) * (torch.rand(4, 4100) < 0.1)
    penalties = torch.tensor([[0.5, 0.3, 1.2], [0.0, 0.0, 0.7], [-1.0, 2.0, 1.0], [0.0, 0.0, 1.0]])
    at, slots = torch.tensor([4, 0, 2]), torch.tensor([1, 0, 2])
    expected = logits.clone()
    sampler.penalise_rows(expected, at, seen, slots, penalties)
    assert not torch.equal(expected, logits)
    gpu_logits.penalise_rows(logits, at, seen, slots, penalties)
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)
