"""RMSNorm with its weight."""

import torch
from torch import Tensor

from kernels.rms_norm import add_rms_norm, rms_norm


class RMSNorm:
    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(size, dtype=dtype, device=device)
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """x: [..., size] -> [..., size]."""
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """-> (norm of the sum, the sum)."""
        return add_rms_norm(x, residual, self.weight, self.eps)
