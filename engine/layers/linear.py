"""Linear layers, fused where several projections read the same input."""

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor

from engine.layers.norm import RMSNorm
from engine.model_config import Activation
from kernels.activation import gelu_and_mul, silu_and_mul
from kernels.linear import PackedWeight, linear, pack_weight
from kernels.quantized_linear import norm_quantized_linear, quantized_linear
from kernels.quantized_weight import QuantizedWeight, quantize_weight

Quantization = Literal["int8"]

_GATES: dict[Activation, Callable[[Tensor], Tensor]] = {"silu": silu_and_mul, "gelu_tanh": gelu_and_mul}


class Linear:
    """y = x W^T + b for one or more projections of one input, stored as one matrix.

    parts: output features by the projection's name, in the order of the fused rows.
    gate: the parts are a gate and an up projection, and y is gate(gate) * up, as wide as one of them.
    stored_as: the name of all parts together, where checkpoints store them as one matrix.
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
        gate: Activation | None = None,
        stored_as: str | None = None,
    ) -> None:
        self.parts = dict(parts)
        self.gate = gate
        self.stored_as = stored_as
        # What is left to do after the product: a quantised weight does SwiGLU within it.
        self._activate = None if gate is None else _GATES[gate]
        out_features = sum(parts.values())
        self.weight: Tensor | PackedWeight | QuantizedWeight
        self.weight = torch.empty(out_features, in_features, dtype=dtype, device=device)
        self.bias = torch.empty(out_features, dtype=dtype, device=device) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, in_features] -> y: [tokens, sum of parts], or half of that with a gate."""
        if isinstance(self.weight, QuantizedWeight):
            y = quantized_linear(x, self.weight, self.bias)
        else:
            y = linear(x, self.weight, self.bias)
        return y if self._activate is None else self._activate(y)

    def after_norm(self, norm: RMSNorm | None, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """-> (y of the norm of x + residual, x + residual); no residual counts as zero, no norm leaves the sum."""
        if norm is None:
            total = x if residual is None else residual + x
            return self(total), total
        if isinstance(self.weight, QuantizedWeight):
            y, total = norm_quantized_linear(x, residual, norm.weight, norm.eps, self.weight, self.bias)
            return y if self._activate is None else self._activate(y), total
        normed, total = (norm(x), x) if residual is None else norm.add(x, residual)
        return self(normed), total

    def pack(self, quantization: Quantization | None = None) -> None:
        """Lay the loaded weight out for the device, in 8 bits if asked for; its `targets` are dead after this."""
        assert isinstance(self.weight, Tensor)
        if quantization:
            self.weight = quantize_weight(self.weight, gated=self.gate == "silu")
            if self.weight.gated:
                self._activate = None
        else:
            self.weight = pack_weight(self.weight)

    def targets(self, prefix: str) -> dict[str, Tensor]:
        """Checkpoint name -> the rows that it fills."""
        assert isinstance(self.weight, Tensor)
        views = {}
        start = 0
        for name, size in ({self.stored_as: len(self.weight)} if self.stored_as else self.parts).items():
            views[f"{prefix}{name}.weight"] = self.weight[start : start + size]
            if self.bias is not None:
                views[f"{prefix}{name}.bias"] = self.bias[start : start + size]
            start += size
        return views
