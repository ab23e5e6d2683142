"""RMSNorm with its weight."""

import torch
from torch import Tensor

from engine.parallel.group import ParallelGroup
from engine.parallel.shares import Span
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


class SharedRMSNorm(RMSNorm):
    """Over the features of all ranks, of which each holds `span`, its share, and no more of the weight."""

    def __init__(
        self, span: Span, eps: float, group: ParallelGroup, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(span.size, eps, dtype=dtype, device=device)
        self._group = group
        self._summed = group.size * span.size  # more than the features where several ranks hold the same

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, span] -> [tokens, span]."""
        wide = x.float()
        mean = self._group.all_reduce(wide.square().sum(-1, keepdim=True)) / self._summed
        return self.weight * (wide * torch.rsqrt(mean + self.eps)).to(x.dtype)
