"""`torch.compile` of the model's forward, with attention as one opaque operator a layer.

What lies between two attentions is compiled as one graph for any number of tokens. The operators know their layer by a
number and find cache and metadata in what `CompiledForward` was called with: so no graph holds a KV cache or the shape
of a batch.
"""

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engine.layers.attention import Attention, KVCache
from engine.models.decoder import Decoder
from kernels.attention import AttentionBackend, AttentionMetadata

_numbers = itertools.count()
_layers: weakref.WeakValueDictionary[int, "_OpaqueAttention"] = weakref.WeakValueDictionary()


class _Call:
    """What the forward that runs now was given."""

    caches: Sequence[KVCache]
    metadata: AttentionMetadata


class _OpaqueAttention(AttentionBackend):
    """Stands in a layer for its backend: the same calls, as operators that the compiler does not look into."""

    name = "compiled"
    default_block_size = 16

    def __init__(self, attention: Attention, call: _Call, index: int) -> None:
        super().__init__(attention.backend.reason, attention.backend.kv_dtype)
        self.backend = attention.backend
        self.rotary = attention.rotary
        self.call = call
        self.index = index
        self.number = next(_numbers)
        self._written: Tensor | None = None
        _layers[self.number] = self

    def supports_block_size(self, block_size: int) -> bool:
        return self.backend.supports_block_size(block_size)

    def kv_cache(self, *shape: Any) -> KVCache:
        return self.backend.kv_cache(*shape)

    def write(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        # Handed on to `attend`, so that neither is left out nor comes before the other.
        self._written = torch.ops.nanoserve_compiled.write(k, v, self.number)

    def rotary_write(self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, positions: Tensor,
                     k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> Tensor:  # fmt: skip
        turned: Tensor = torch.ops.nanoserve_compiled.rotary_write(q, k, v, positions, self.number)
        return turned

    def attend(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        metadata: AttentionMetadata,
        scale: float,
        window: int = 0,
        soft_cap: float = 0.0,
    ) -> Tensor:
        written, self._written = self._written, None
        out: Tensor = torch.ops.nanoserve_compiled.attend(q, written, scale, window, soft_cap, self.number)
        return out


@torch.library.custom_op("nanoserve_compiled::write", mutates_args=())
def _write(k: Tensor, v: Tensor, number: int) -> Tensor:
    layer = _layers[number]
    layer.backend.write(k, v, *layer.call.caches[layer.index], layer.call.metadata.slots)
    return k.new_empty(0)


@torch.library.custom_op("nanoserve_compiled::rotary_write", mutates_args=())
def _rotary_write(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, number: int) -> Tensor:
    layer = _layers[number]
    assert layer.rotary is not None
    cache, slots = layer.call.caches[layer.index], layer.call.metadata.slots
    return layer.backend.rotary_write(q, k, v, *layer.rotary, positions, *cache, slots).contiguous()


@torch.library.custom_op("nanoserve_compiled::attend", mutates_args=())
def _attend(q: Tensor, written: Tensor | None, scale: float, window: int, soft_cap: float, number: int) -> Tensor:
    layer = _layers[number]
    cache, metadata = layer.call.caches[layer.index], layer.call.metadata
    return layer.backend.attend(q, *cache, metadata, scale, window, soft_cap).contiguous()


@_write.register_fake
def _(k: Tensor, v: Tensor, number: int) -> Tensor:
    return k.new_empty(0)


@_rotary_write.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, number: int) -> Tensor:
    return q.new_empty(q.shape)


@_attend.register_fake
def _(q: Tensor, written: Tensor | None, scale: float, window: int, soft_cap: float, number: int) -> Tensor:
    return q.new_empty(q.shape)


class CompiledForward:
    """Takes the place of `model.forward`, with its arguments. It compiles when it is first called.

    backend: of torch.compile, which turns the graphs into code.
    """

    def __init__(self, model: Decoder, backend: str) -> None:
        self._call = _Call()
        for index, layer in enumerate(model.layers):
            layer.attention.backend = _OpaqueAttention(layer.attention, self._call, index)
        self._compiled = torch.compile(model.forward, dynamic=True, backend=backend)

    def __call__(
        self, token_ids: Tensor, positions: Tensor, caches: Sequence[KVCache], metadata: AttentionMetadata
    ) -> Tensor:
        self._call.caches, self._call.metadata = caches, metadata
        return self._compiled(token_ids, positions, caches, metadata)
