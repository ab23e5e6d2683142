"""Paged attention in C++ for float32 on a CPU (`kernels/cpu/attention.h`); its cache is float32, bfloat16 or int8."""

import torch
from torch import Tensor

from kernels import cpu_ops
from kernels.attention.backend import AttentionBackend, scale_width
from kernels.attention.metadata import AttentionMetadata
from kernels.zeros import lazy_zeros

MAX_HEAD_DIM = 256
KV_DTYPES = (torch.float32, torch.bfloat16, torch.int8)
_CHUNK = 128


class CpuBackend(AttentionBackend):
    """K: [num_blocks, kv_heads, head_dim, block_size], V: [num_blocks, kv_heads, block_size, head_dim].

    K pages are transposed so that a vector register holds the same dimensions of neighbouring tokens: scores need no
    sums across lanes. Block sizes are multiples of 16 up to 128, or multiples of 128. In int8, head_dim is 4 more: a
    page holds its values, then block_size float32 scales. Narrow values lie in words of 32 bits that one instruction
    multiplies at a time, so within a page K is [head_dim / n, block_size, n] and V [block_size / n, head_dim, n], n
    being 2 in bfloat16 and 4 in int8; int8 values have 128 added. `kernels/cpu/attention_products.h` says what a row's
    own numbers are rounded to.
    """

    name = "cpu"
    default_block_size = 16

    @staticmethod
    def supports_model(dtype: torch.dtype, head_dim: int, kv_dtype: torch.dtype | None = None) -> bool:
        stored = kv_dtype or dtype
        return dtype is torch.float32 and stored in KV_DTYPES and head_dim % 16 == 0 and 16 <= head_dim <= MAX_HEAD_DIM

    def supports_block_size(self, block_size: int) -> bool:
        return block_size >= 16 and block_size % (16 if block_size <= _CHUNK else _CHUNK) == 0

    def kv_cache(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> tuple[Tensor, Tensor]:
        stored = self.kv_dtype or dtype
        if not (self.supports_model(dtype, head_dim, stored) and self.supports_block_size(block_size)):
            raise ValueError(
                "the cpu attention backend takes float32, a cache of float32, bfloat16 or int8, a head_dim that is "
                f"a multiple of 16 up to {MAX_HEAD_DIM} and a block_size that is a multiple of 16 up to {_CHUNK} or a "
                f"multiple of {_CHUNK}; got {dtype}, a cache of {stored}, head_dim {head_dim}, block_size {block_size}"
            )
        width = head_dim + scale_width(stored)
        k = lazy_zeros((num_blocks, num_kv_heads, width, block_size), stored, device)
        v = lazy_zeros((num_blocks, num_kv_heads, block_size, width), stored, device)
        return k, v

    def write(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        cpu_ops.kv_write(k, v, k_cache, v_cache, slots)

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
        return cpu_ops.paged_attention(
            q,
            k_cache,
            v_cache,
            metadata.query_start,
            metadata.seq_lens,
            metadata.block_tables,
            metadata.rows,
            scale,
            window,
            soft_cap,
        )

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
        return cpu_ops.rotary_write(q, k, v, cos, sin, positions, k_cache, v_cache, slots)

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
        return cpu_ops.rotary_attention(
            qkv,
            *rotary,
            positions,
            *cache,
            metadata.slots,
            metadata.query_start,
            metadata.seq_lens,
            metadata.block_tables,
            metadata.rows,
            scale,
            window,
            soft_cap,
        )
