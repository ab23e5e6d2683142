"""Linear layers, fused where several projections read the same input."""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from engine.layers.norm import RMSNorm
from kernels.activation import silu_and_mul
from kernels.linear import PackedWeight, linear, pack_weight
from kernels.quantized_linear import QuantizedWeight, norm_quantized_linear, quantize_weight, quantized_linear

Quantization = Literal["int8"]


class Linear:
    """y = x W^T + b for one or more projections of one input, stored as one matrix.

    parts: output features by the projection's name, in the order of the fused rows.
    gated: the parts are a gate and an up projection, and y is SiLU(gate) * up, as wide as one of them.
    weight: [sum of parts, in_features], or that in packed or quantised form.
    """

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        gated: bool = False,
    ) -> None:
        self.parts = dict(parts)
        self.gated = gated
        out_features = sum(parts.values())
        self.weight: Tensor | PackedWeight | QuantizedWeight
        self.weight = torch.empty(out_features, in_features, dtype=dtype, device=device)
        self.bias = torch.empty(out_features, dtype=dtype, device=device) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, in_features] -> y: [tokens, sum of parts], or half of that if gated."""
        if isinstance(self.weight, QuantizedWeight):
            return quantized_linear(x, self.weight, self.bias)
        y = linear(x, self.weight, self.bias)
        return silu_and_mul(y) if self.gated else y

    def after_norm(self, norm: RMSNorm, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """-> (y of the norm of x + residual, x + residual); no residual counts as zero."""
        if isinstance(self.weight, QuantizedWeight):
            return norm_quantized_linear(x, residual, norm.weight, norm.eps, self.weight, self.bias)
        normed, total = (norm(x), x) if residual is None else norm.add(x, residual)
        return self(normed), total

    def pack(self, quantization: Quantization | None = None) -> None:
        """Lay the loaded weight out for the device, in 8 bits if asked for; its `targets` are dead after this."""
        assert isinstance(self.weight, Tensor)
        if quantization:
            self.weight = quantize_weight(self.weight, self.gated)
        else:
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
