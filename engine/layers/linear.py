"""Linear layers, fused where several projections read the same input."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from engine.layers.norm import RMSNorm
from engine.layers.target import Parts, Target
from engine.model_config import Activation
from kernels.activation import gelu_and_mul, silu_and_mul
from kernels.linear import PackedWeight, linear, pack_weight, packs
from kernels.quantized_linear import norm_quantized_linear, quantized_linear
from kernels.quantized_weight import QuantizedWeight, quantize_weight

Quantization = Literal["int8"]

_GATES: dict[Activation, Callable[[Tensor], Tensor]] = {"silu": silu_and_mul, "gelu_tanh": gelu_and_mul}


class Linear:
    """y = x W^T + b for one or more projections of one input, stored as one matrix.

    parts: output features by the projection's name, in the order of the fused rows.
    gate: the parts are a gate and an up projection, and y is gate(gate) * up, as wide as one of them.
    stored_as: the name of all parts together, where checkpoints store them as one matrix.
    quantization: "int8" keeps the weight in 8 bits or fewer; for float32 on a CPU.
    weight: [sum of parts, in_features]; where it has a packed or quantised form, that, once its `targets` are filled.
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
        quantization: Quantization | None = None,
    ) -> None:
        self.parts = dict(parts)
        self.gate = gate
        self.stored_as = stored_as
        self.quantization = quantization
        # What is left to do after the product: a quantised weight does SwiGLU within it.
        self._activate = None if gate is None else _GATES[gate]
        out_features = sum(parts.values())
        self.bias = torch.empty(out_features, dtype=dtype, device=device) if bias else None
        self.weight: Tensor | PackedWeight | QuantizedWeight
        self._parts = None
        if quantization or packs(dtype, device):
            sizes = [out_features] if stored_as else list(parts.values())
            self._parts = Parts(sizes, in_features, self.lay_out)
            device = torch.device("meta")
        self.weight = torch.empty(out_features, in_features, dtype=dtype, device=device)

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

    def lay_out(self, sources: list[Tensor]) -> None:
        """sources: [rows, in_features], one under the other, on a CPU: the weight, for which this makes its form."""
        if self.quantization:
            self.weight = quantize_weight(*sources, gated=self.gate == "silu")
            if self.weight.gated:
                self._activate = None
        else:
            self.weight = pack_weight(*sources)

    def targets(self, prefix: str) -> dict[str, Target]:
        """Checkpoint name -> the rows that it fills."""
        parts = {self.stored_as: sum(self.parts.values())} if self.stored_as else self.parts
        sizes = list(parts.values())
        rows: Sequence[Target]
        if self._parts is not None:
            rows = self._parts.targets
        else:
            assert isinstance(self.weight, Tensor)
            rows = self.weight.split(sizes)
        views: dict[str, Target] = {f"{prefix}{name}.weight": part for name, part in zip(parts, rows, strict=True)}
        if self.bias is not None:
            biases = self.bias.split(sizes)
            views |= {f"{prefix}{name}.bias": part for name, part in zip(parts, biases, strict=True)}
        return views
