"""Low-rank adapters in a batch of several, some tokens without.

The interpreter multiplies no bfloat16 matrices.
"""

import numpy as np
import pytest
import torch

from kernels import lora
from kernels.gpu import lora as gpu_lora

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rank", "k", "parts"), [(8, 80, (96, 32, 32)), (32, 64, (72,)), (40, 130, (64, 64))])
def test_adapters_of_a_mixed_batch(rank, k, parts, dtype):
    weights = lora.lora_weights(3, rank, k, parts, dtype=dtype, device=torch.device("cpu"))
    weights.a.normal_(0.0, k**-0.5)
    weights.b.normal_(0.0, rank**-0.5)
    slots = np.array([2, -1, 0, *[2] * 20, -1, 0], dtype=np.int32)
    order, tiles = lora.lora_tiles(slots)
    tokens = lora.LoraTokens(torch.from_numpy(order), torch.from_numpy(tiles))
    x = torch.randn(len(slots), k + 5).to(dtype)[:, :k]
    y = torch.randn(len(slots), sum(parts) + 8).to(dtype)
    mine, beside = y[:, : sum(parts)], y[:, sum(parts) :].clone()
    before, expected = mine.clone(), mine.float()
    lora.reference(expected, x.float(), lora.LoraWeights(weights.a.float(), weights.b.float(), parts, weights.columns),
                   tokens)  # fmt: skip
    gpu_lora.add_lora(mine, x, weights, tokens)
    torch.testing.assert_close(mine.float(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert torch.equal(mine[slots < 0], before[slots < 0])
    assert torch.equal(y[:, sum(parts) :], beside)


def test_no_adapter_changes_nothing():
    weights = lora.lora_weights(1, 16, 64, (64,), dtype=torch.float32, device=torch.device("cpu"))
    order, tiles = lora.lora_tiles(np.full(3, -1, dtype=np.int32))
    y = torch.randn(3, 64)
    before = y.clone()
    gpu_lora.add_lora(y, torch.randn(3, 64), weights, lora.LoraTokens(torch.from_numpy(order), torch.from_numpy(tiles)))
    assert torch.equal(y, before)
