"""Linear layers, fused where several projections read the same input."""

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Literal

import torch
from torch import Tensor

from engine.layers.norm import RMSNorm
from engine.layers.target import Parts, Slices, Target
from engine.model_config import Activation
from engine.parallel.group import ParallelGroup
from engine.parallel.shares import Span
from kernels.activation import gelu_and_mul, silu_and_mul
from kernels.linear import PackedWeight, add_norm_linear, linear, pack_weight, packs
from kernels.quantized_linear import add_quantized_linear, norm_quantized_linear, quantized_linear
from kernels.quantized_weight import QuantizedWeight, quantize_weight

Quantization = Literal["int8"]

GATES: dict[Activation, Callable[[Tensor], Tensor]] = {"silu": silu_and_mul, "gelu_tanh": gelu_and_mul}


class Linear:
    """y = x W^T + b for one or more projections of one input, stored as one matrix.

    in_features, parts: input features, and output features by the projection's name, in the order of the fused rows;
        of those a checkpoint has, the span that this rank holds. Where it holds some of the inputs, y is a term of the
        sum over all ranks, and the first of them adds the bias.
    gate: the parts are a gate and an up projection, and y is gate(gate) * up, as wide as one of them.
    stored_as: the name of all parts together, where checkpoints store them as one matrix.
    quantization: "int8" keeps the weight in 8 bits or fewer; for float32 on a CPU.
    weight: [sum of parts, in_features]; where it has a packed or quantised form, that, once its `targets` are filled.
    """

    def __init__(
        self,
        in_features: int | Span,
        parts: Mapping[str, int] | Mapping[str, Span],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        gate: Activation | None = None,
        stored_as: str | None = None,
        quantization: Quantization | None = None,
    ) -> None:
        self.columns = Span.of(in_features)
        self.rows = {name: Span.of(size) for name, size in parts.items()}
        self.parts = {name: rows.size for name, rows in self.rows.items()}
        self.gate = gate
        self.stored_as = stored_as
        self.quantization = quantization
        # What is left to do after the product: a packed or quantised weight does SwiGLU within it.
        self._activate = None if gate is None else GATES[gate]
        self._device = device
        self._has_bias = bias
        out_features = sum(self.parts.values())
        self.bias = None
        if bias and self.columns.start == 0:
            self.bias = torch.empty(out_features, dtype=dtype, device=device)
        self.weight: Tensor | PackedWeight | QuantizedWeight
        self._parts = None
        if quantization or packs(dtype, device):
            self._parts = Parts(
                list(self.parts.values()), self.columns.size, self.lay_out, rounded=quantization is not None
            )
            device = torch.device("meta")
        self.weight = torch.empty(out_features, self.columns.size, dtype=dtype, device=device)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, in_features] -> y: [tokens, sum of parts], or half of that with a gate."""
        if isinstance(self.weight, QuantizedWeight):
            y = quantized_linear(x, self.weight, self.bias)
        else:
            y = linear(x, self.weight, self.bias)
        return y if self._activate is None else self._activate(y)

    def added(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor | None]:
        """-> (y, residual) whose sum is to be, or (that sum in the place of residual, None) where this can add it."""
        if not isinstance(self.weight, QuantizedWeight):
            return self(x), residual
        add_quantized_linear(residual, x, self.weight, self.bias)
        return residual, None

    def after_norm(self, norm: RMSNorm | None, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """-> (y of the norm of x + residual, x + residual); no residual counts as zero, no norm leaves the sum."""
        if norm is None:
            total = x if residual is None else residual + x
            return self(total), total
        if isinstance(self.weight, QuantizedWeight):
            y, total = norm_quantized_linear(x, residual, norm.weight, norm.eps, self.weight, self.bias)
            return y if self._activate is None else self._activate(y), total
        if isinstance(self.weight, PackedWeight) and residual is not None:
            y, total = add_norm_linear(x, residual, norm.weight, norm.eps, self.weight, self.bias)
            return y if self._activate is None else self._activate(y), total
        normed, total = (norm(x), x) if residual is None else norm.add(x, residual)
        return self(normed), total

    def lay_out(self, sources: list[Tensor]) -> None:
        """sources: [rows, in_features], one under the other, on a CPU: the weight, for which this makes its form."""
        if self.quantization:
            self.weight = quantize_weight(*sources, gated=self.gate == "silu")
        else:
            self.weight = pack_weight(*sources, gated=self.gate == "silu")
        if self.weight.gated:
            self._activate = None

    def targets(self, prefix: str) -> dict[str, Target]:
        """Checkpoint name -> the rows that it fills."""
        sizes = list(self.parts.values())
        weights: Sequence[Target]
        if self._parts is not None:
            weights = self._parts.targets
        else:
            assert isinstance(self.weight, Tensor)
            weights = self.weight.split(sizes)
        found = self._named(prefix, "weight", weights, self.columns)
        if self._has_bias:
            found |= self._named(prefix, "bias", [] if self.bias is None else self.bias.split(sizes))
        return found

    def _named(self, prefix: str, kind: str, targets: Sequence[Target], *columns: Span) -> dict[str, Target]:
        """targets: one for each projection, or none."""
        names = [f"{prefix}{self.stored_as or name}.{kind}" for name in self.rows]
        if not self.stored_as and all(span.is_all for span in (*self.rows.values(), *columns)) and targets:
            return dict(zip(names, targets, strict=True))
        found = {name: Slices(self._device) for name in names}
        for name, rows, target in zip_longest(names, self.rows.values(), targets):
            found[name].add(target, rows, *columns)
        return dict(found)


class SummedLinear(Linear):
    """y is the sum over all ranks, each of which holds some of the inputs."""

    def __init__(self, group: ParallelGroup, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group

    def __call__(self, x: Tensor) -> Tensor:
        return self.group.all_reduce(super().__call__(x))

    def added(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor | None]:
        return self(x), residual


def row_linear(group: ParallelGroup | None, *args: Any, **kwargs: Any) -> Linear:
    """Of what ranks share the inputs of, or of one rank."""
    return Linear(*args, **kwargs) if group is None else SummedLinear(group, *args, **kwargs)
