"""Linear layers, fused where several projections read the same input."""

from collections.abc import Mapping

import torch
from torch import Tensor

from kernels.linear import PackedWeight, linear, pack_weight


class Linear:
    """y = x W^T + b for one or more projections of one input, stored as one matrix.

    parts: output features by the projection's name, in the order of the fused rows.
    weight: [sum of parts, in_features], or that in packed form.
    """

    def __init__(
        self, in_features: int, parts: Mapping[str, int], *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.parts = dict(parts)
        out_features = sum(parts.values())
        self.weight: Tensor | PackedWeight = torch.empty(out_features, in_features, dtype=dtype, device=device)
        self.bias = torch.empty(out_features, dtype=dtype, device=device) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, in_features] -> [tokens, sum of parts]."""
        return linear(x, self.weight, self.bias)

    def pack(self) -> None:
        """Lay the loaded weight out for the device; its `targets` are dead after this."""
        assert isinstance(self.weight, Tensor)
        self.weight = pack_weight(self.weight)

    def targets(self, prefix: str) -> dict[str, Tensor]:
        """Checkpoint name -> the rows that it fills."""
        assert isinstance(self.weight, Tensor)
        views = {}
        start = 0
        for name, size in self.parts.items():
            views[f"{prefix}{name}.weight"] = self.weight[start : start + size]
            if self.bias is not None:
                views[f"{prefix}{name}.bias"] = self.bias[start : start + size]
            start += size
        return views
