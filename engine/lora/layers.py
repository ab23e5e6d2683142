"""Layers that add their tokens' adapters to what their weights give."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.layers.linear import GATES, Linear
from engine.layers.mlp import MLP
from engine.layers.norm import RMSNorm
from engine.lora.adapter import Adapter, TargetModule
from engine.models.decoder import Decoder
from engine.pinned import Upload
from engine.step import StepAdapters, StepPlan
from kernels.linear import linear
from kernels.lora import LoraTokens, LoraWeights, add_lora, lora_tiles, lora_weights
from kernels.quantized_linear import ungated_linear
from kernels.quantized_weight import QuantizedWeight


@dataclass(slots=True)
class _Step:
    """tokens: those of the step that runs now which have an adapter; None: there are none."""

    tokens: LoraTokens | None = None


class AdaptedLinear(Linear):
    """Takes the place of a packed `Linear`. In a step without adapters it is that one."""

    def __init__(self, plain: Linear, lora: LoraWeights, step: _Step) -> None:
        self.__dict__.update(plain.__dict__)
        self.lora = lora
        self._step = step

    def __call__(self, x: Tensor) -> Tensor:
        tokens = self._step.tokens
        return super().__call__(x) if tokens is None else self._adapted(x, tokens)

    def after_norm(self, norm: RMSNorm | None, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        tokens = self._step.tokens
        if tokens is None:
            return super().after_norm(norm, x, residual)
        if norm is None:
            total = x if residual is None else residual + x
            return self._adapted(total, tokens), total
        normed, total = (norm(x), x) if residual is None else norm.add(x, residual)
        return self._adapted(normed, tokens), total

    def _adapted(self, x: Tensor, tokens: LoraTokens) -> Tensor:
        if isinstance(self.weight, QuantizedWeight):
            y = ungated_linear(x, self.weight, self.bias)
        else:
            y = linear(x, self.weight, self.bias)
        add_lora(y, x, self.lora, tokens)
        return y if self.gate is None else GATES[self.gate](y)


class ModelAdapters:
    """The slots of all layers of a model, which it changes so that they take adapters.

    targets: what an adapter may change, by its module's name in a checkpoint.
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
        number, sizes = len(self._layers), tuple(plain.parts.values())
        in_features = plain.columns.size
        for part, (name, size) in enumerate(plain.parts.items()):
            self.targets[prefix + name] = TargetModule(number, (part,), (size,), in_features)
        if plain.stored_as is not None:
            self.targets[prefix + plain.stored_as] = TargetModule(number, tuple(range(len(sizes))), sizes, in_features)
        weights = lora_weights(slots, max_rank, in_features, sizes, dtype=dtype, device=device)
        self._layers.append(AdaptedLinear(plain, weights, self._step))
        return self._layers[-1]

    def _put(self, loads: Sequence[tuple[int, Adapter]]) -> None:
        """Bring adapters to their slots, in place of what is there."""
        for slot, adapter in loads:
            for number, layer in enumerate(self._layers):
                lora, start = layer.lora, 0
                lora.a[slot].zero_()  # not B alone: 0 times an infinite number of another adapter is none
                lora.b[slot].zero_()
                for part, size in enumerate(lora.parts):
                    if (found := adapter.parts.get((number, part))) is not None:
                        rank = len(found.a)
                        at = part * lora.rank
                        lora.a[slot, :, at : at + rank].copy_(found.a.T)
                        lora.b[slot, :rank, start : start + size].copy_(found.b.T)
                    start += size

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
