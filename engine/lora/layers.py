"""Layers that add their tokens' adapters to what their weights give."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.device.pinned import Upload
from engine.layers.linear import GATES, Linear, SummedLinear
from engine.layers.mlp import MLP
from engine.layers.norm import RMSNorm
from engine.lora.adapter import Adapter, LowRank, TargetModule
from engine.models.decoder import Decoder
from engine.step import StepAdapters, StepPlan
from kernels.linear import ungated_linear
from kernels.lora import LoraTokens, LoraWeights, add_lora, lora_tiles, lora_weights
from kernels.quantized_linear import ungated_linear as ungated_quantized_linear
from kernels.quantized_weight import QuantizedWeight


@dataclass(slots=True)
class _Step:
    """tokens: those of the step that runs now which have an adapter; None: there are none."""

    tokens: LoraTokens | None = None


class AdaptedLinear(Linear):
    """Takes the place of a packed `Linear`. In a step without adapters it is that one.

    A rank of several has of A and B the columns and rows that it has of the weight.
    """

    def __init__(self, plain: Linear, lora: LoraWeights, step: _Step) -> None:
        self.__dict__.update(plain.__dict__)
        self.lora = lora
        self._plain = plain
        self._group = plain.group if isinstance(plain, SummedLinear) else None
        self._step = step

    def __call__(self, x: Tensor) -> Tensor:
        tokens = self._step.tokens
        return self._plain(x) if tokens is None else self._adapted(x, tokens)

    def added(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor | None]:
        return self._plain.added(x, residual) if self._step.tokens is None else (self(x), residual)

    def after_norm(self, norm: RMSNorm | None, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        tokens = self._step.tokens
        if tokens is None:
            return self._plain.after_norm(norm, x, residual)
        if norm is None:
            total = x if residual is None else residual + x
            return self._adapted(total, tokens), total
        normed, total = (norm(x), x) if residual is None else norm.add(x, residual)
        return self._adapted(normed, tokens), total

    def _adapted(self, x: Tensor, tokens: LoraTokens) -> Tensor:
        if isinstance(self.weight, QuantizedWeight):
            y = ungated_quantized_linear(x, self.weight, self.bias)
        else:
            y = ungated_linear(x, self.weight, self.bias)
        add_lora(y, x, self.lora, tokens)
        if self._group is not None:
            y = self._group.all_reduce(y)
        return y if self.gate is None else GATES[self.gate](y)

    def put(self, slot: int, parts: Sequence[LowRank | None]) -> None:
        """Bring an adapter to a slot, in place of what is there. parts: of it, for each projection."""
        lora, columns, start = self.lora, self.columns.slice, 0
        lora.a[slot].zero_()  # not B alone: 0 times an infinite number of another adapter is none
        lora.b[slot].zero_()
        for part, (found, rows) in enumerate(zip(parts, self.rows.values(), strict=True)):
            if found is not None:
                rank = len(found.a)
                at = part * lora.rank
                lora.a[slot, :, at : at + rank].copy_(found.a[:, columns].T)
                lora.b[slot, :rank, start : start + rows.size].copy_(found.b[rows.slice].T)
            start += rows.size


class ModelAdapters:
    """The slots of all layers of a model, which it changes so that they take adapters.

    targets: what an adapter may change, by its module's name in a checkpoint; whole, also where ranks share the model.
    """

    def __init__(self, model: Decoder, slots: int, max_rank: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.targets: dict[str, TargetModule] = {}
        self._layers: list[AdaptedLinear] = []
        self._step = _Step()
        self._last: tuple[bytes, LoraTokens | None] | None = None
        sizes = slots, max_rank, dtype, device
        for i, layer in enumerate(model.layers):
            attention, mlp, prefix = layer.attention, layer.mlp, f"model.layers.{i}."
            attention.qkv = self._adapt(attention.qkv, f"{prefix}self_attn.", *sizes)
            attention.output = self._adapt(attention.output, f"{prefix}self_attn.", *sizes)
            if isinstance(mlp, MLP):
                mlp.gate_up = self._adapt(mlp.gate_up, f"{prefix}mlp.", *sizes)
                mlp.down = self._adapt(mlp.down, f"{prefix}mlp.", *sizes)

    def _adapt(
        self, plain: Linear, prefix: str, slots: int, max_rank: int, dtype: torch.dtype, device: torch.device
    ) -> AdaptedLinear:
        number, whole = len(self._layers), tuple(rows.whole for rows in plain.rows.values())
        in_features = plain.columns.whole
        for part, (name, size) in enumerate(zip(plain.rows, whole, strict=True)):
            self.targets[prefix + name] = TargetModule(number, (part,), (size,), in_features)
        if plain.stored_as is not None:
            self.targets[prefix + plain.stored_as] = TargetModule(number, tuple(range(len(whole))), whole, in_features)
        held = tuple(plain.parts.values())
        weights = lora_weights(slots, max_rank, plain.columns.size, held, dtype=dtype, device=device)
        self._layers.append(AdaptedLinear(plain, weights, self._step))
        return self._layers[-1]

    def _put(self, loads: Sequence[tuple[int, Adapter]]) -> None:
        """Bring adapters to their slots, in place of what is there."""
        for slot, adapter in loads:
            for number, layer in enumerate(self._layers):
                layer.put(slot, [adapter.parts.get((number, part)) for part in range(len(layer.rows))])

    def begin(self, plan: StepPlan, adapters: StepAdapters, upload: Upload) -> None:
        """Until `end`, the layers add what the plan's sequences have of adapters."""
        self._put(adapters.loads)
        slots = adapters.slots
        if plan.num_tokens != len(plan.rows):
            slots = np.repeat(slots, np.diff(plan.query_start))
        key = slots.tobytes()
        if self._last is None or self._last[0] != key:  # the next decode of the same rows has the same
            order, tiles = lora_tiles(slots)
            tokens = LoraTokens(upload(order), upload(tiles)) if len(order) else None
            self._last = key, tokens
        self._step.tokens = self._last[1]

    def end(self) -> None:
        self._step.tokens = None
