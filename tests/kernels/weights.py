"""Weights whose values came out of whole numbers, as a GGUF file's do: float32 [n, k]."""

import torch
from torch import Tensor

from kernels.quantized_weight import GROUP


def _dequantised(n: int, k: int, low: int, high: int) -> tuple[Tensor, Tensor]:
    """-> codes that reach both ends in each group, and a scale for each: [n, groups, GROUP] and [n, groups, 1]."""
    codes = torch.randint(low, high + 1, (n, k // GROUP, GROUP)).float()
    codes[..., 3], codes[..., 20] = low, high
    return codes, (torch.rand(n, k // GROUP, 1) * 0.01).half().float()


def q4_0(n: int, k: int) -> Tensor:
    codes, scale = _dequantised(n, k, -8, 7)
    return (codes * scale * torch.where(torch.rand_like(scale) < 0.5, -1, 1)).flatten(1)


def q4_1(n: int, k: int) -> Tensor:
    codes, scale = _dequantised(n, k, 0, 15)
    return (codes * scale + (-8 * scale + torch.rand_like(scale) * 0.01).half().float()).flatten(1)


def q5_0(n: int, k: int) -> Tensor:
    codes, scale = _dequantised(n, k, -16, 15)
    return (codes * scale).flatten(1)


def q8_0(n: int, k: int) -> Tensor:
    codes, scale = _dequantised(n, k, -127, 127)
    return (codes * scale).flatten(1)
