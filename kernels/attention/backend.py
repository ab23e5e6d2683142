"""The interface of an attention backend: it owns the layout of the KV cache, writes it and reads it."""

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from kernels.attention.metadata import AttentionMetadata
from kernels.rms_norm import rms_norm
from kernels.rotary import apply_rotary

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


class HeadNorms(NamedTuple):
    """RMSNorm of each head of q and of k, as Qwen 3 has it. q_weight, k_weight: [head_dim]."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float

    def __call__(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q, k: [tokens, heads, head_dim], normed."""
        return rms_norm(q, self.q_weight, self.eps), rms_norm(k, self.k_weight, self.eps)


class AttentionBackend(ABC):
    """Chosen before the block pool exists, since it decides which block sizes there can be.

    name: for logs and settings.
    default_block_size: tokens a block where nobody asked for a size.
    reason: why this backend was chosen, one clause for one log line.
    kv_dtype: what the cache stores, float32, bfloat16, float16, int8 or float8_e4m3fn; None: the model's own type. The
        two of 8 bits have a scale for each token and KV head of K and of V, which lies in the cache beside the values.
    """

    name: ClassVar[str]
    default_block_size: ClassVar[int]

    def __init__(self, reason: str = "asked for by name", kv_dtype: torch.dtype | None = None) -> None:
        self.reason = reason
        self.kv_dtype = kv_dtype

    @abstractmethod
    def supports_block_size(self, block_size: int) -> bool:
        """Whether blocks of this many tokens can be used."""

    @abstractmethod
    def kv_cache(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> tuple[Tensor, Tensor]:
        """One layer's K and V, zeroed, num_blocks first; the rest of the shape is the backend's own.

        dtype: the model's; the cache is of `kv_dtype` where that is set. All of a block, scales too, is in its rows
        [block] of the two tensors, so blocks can be copied without knowing the layout.
        """

    def kv_token_bytes(self, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes that one token takes in one layer's K and V; dtype: the model's."""
        stored = self.kv_dtype or dtype
        return 2 * num_kv_heads * (head_dim + scale_width(stored)) * stored.itemsize

    @abstractmethod
    def write(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        """Store k, v: [tokens, kv_heads, head_dim] at slots: int64 [tokens]; a slot of -1 is passed over."""

    @abstractmethod
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
        """q: [tokens, heads, head_dim] -> softmax(cap(scale q K^T)) V, causal, [tokens, heads, head_dim].

        The step's own KV must have been written. heads is a multiple of kv_heads; consecutive query heads
        share one KV head.

        window: a token sees itself and the window - 1 tokens before it; 0: all before it.
        soft_cap: cap(s) = soft_cap tanh(s / soft_cap), as Gemma 2 bounds its scores; 0: the scores as they are.
        """

    def rotary_write(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slots: Tensor,
    ) -> Tensor:
        """Turn q and k (`kernels.rotary.apply_rotary`), store k and v, return the turned q."""
        q, k = apply_rotary(q, k, cos, sin, positions)
        self.write(k, v, k_cache, v_cache, slots)
        return q

    def rotary_attend(
        self,
        qkv: Tensor,
        num_heads: int,
        num_kv_heads: int,
        rotary: tuple[Tensor, Tensor],
        positions: Tensor,
        cache: tuple[Tensor, Tensor],
        metadata: AttentionMetadata,
        scale: float,
        window: int = 0,
        soft_cap: float = 0.0,
    ) -> Tensor:
        """`rotary_write`, then `attend`. rotary: cos and sin; cache: K and V.

        qkv: [tokens, (num_heads + 2 * num_kv_heads) * head_dim] -> [tokens, num_heads * head_dim].
        """
        heads = qkv.unflatten(-1, (num_heads + 2 * num_kv_heads, -1))
        q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
        q = self.rotary_write(q, k, v, *rotary, positions, *cache, metadata.slots)
        return self.attend(q, *cache, metadata, scale, window, soft_cap).flatten(1)

    def norm_rotary_write(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        norms: HeadNorms | None,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slots: Tensor,
    ) -> Tensor:
        """`rotary_write` of q and k with their heads normed, if `norms` are given."""
        if norms is not None:
            q, k = norms(q, k)
        return self.rotary_write(q, k, v, cos, sin, positions, k_cache, v_cache, slots)


def scale_width(dtype: torch.dtype) -> int:
    """Elements that a token's scale takes beside its head_dim values: a float32 in int8 and fp8, else none."""
    return 4 if dtype in (torch.int8, FP8) else 0
