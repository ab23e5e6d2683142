"""Attention by the `flash-attn` 2 package and by FlashAttention 3's (`flash_attn_interface`), where they are installed.

Both read KV of the model's own type in pages [num_blocks, block_size, kv_heads, head_dim]; flash-attn 2 wants pages of
256 tokens. They take their sequences' block tables in order and leave rows of no sequence as they find them, so both
is seen to here. Tokens are normed, turned and stored by `kernels.gpu.kv_write`.
"""

import importlib
from abc import abstractmethod
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention.backend import AttentionBackend, HeadNorms
from kernels.attention.metadata import AttentionMetadata

FLASH_2, FLASH_3 = "flash_attn", "flash_attn_interface"
MAX_HEAD_DIM = 256


class FlashBackend(AttentionBackend):
    """What the two have in common. page: block sizes are multiples of it; package: what is imported."""

    page: ClassVar[int]
    package: ClassVar[str]

    @classmethod
    def supports_model(
        cls, capability: tuple[int, int], dtype: torch.dtype, head_dim: int, kv_dtype: torch.dtype | None = None
    ) -> bool:
        kernels = capability >= (8, 0) if cls.package == FLASH_2 else capability[0] == 9
        halves = dtype in (torch.bfloat16, torch.float16) and kv_dtype in (None, dtype)
        return kernels and halves and head_dim % 8 == 0 and head_dim <= MAX_HEAD_DIM

    def supports_block_size(self, block_size: int) -> bool:
        return block_size > 0 and block_size % self.page == 0

    def kv_cache(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> tuple[Tensor, Tensor]:
        if not self.supports_block_size(block_size) or self.kv_dtype not in (None, dtype):
            raise ValueError(
                f"the {self.name} attention backend takes a block_size that is a multiple of {self.page} and a cache "
                f"of the model's type; got {block_size} and a cache of {self.kv_dtype} for {dtype}"
            )
        shape = (num_blocks, block_size, num_kv_heads, head_dim)
        return torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device)

    def write(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        from kernels.gpu import kv_formats, kv_write

        kv_write.write(k, v, k_cache.transpose(1, 2), v_cache.transpose(1, 2), slots, kv_formats.PLAIN.value)

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
        return self.norm_rotary_write(q, k, v, None, cos, sin, positions, k_cache, v_cache, slots)

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
        from kernels.gpu import kv_formats, kv_write

        q_weight, k_weight, eps = norms or (None, None, 0.0)
        caches = (k_cache.transpose(1, 2), v_cache.transpose(1, 2))
        return kv_write.rotary_write(
            q, k, v, q_weight, k_weight, eps, cos, sin, positions, *caches, slots, kv_formats.PLAIN.value
        )

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
        if len(q) == 0 or len(metadata.seq_lens) == 0:
            return torch.zeros_like(q, memory_format=torch.contiguous_format)
        out = self._attend(
            q.contiguous(),
            k_cache,
            v_cache,
            metadata,
            metadata.block_tables.index_select(0, metadata.rows),
            softmax_scale=scale,
            causal=True,
            window_size=(window - 1, 0) if window else (-1, -1),
            softcap=soft_cap,
        )
        padding = torch.arange(len(q), device=q.device) >= metadata.query_start[-1]
        return out.masked_fill_(padding[:, None, None], 0.0)

    @abstractmethod
    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, metadata: AttentionMetadata, tables: Tensor, **options: Any
    ) -> Tensor:
        """tables: int32 [S, max_blocks], in the order of the sequences. Rows of no sequence may hold anything."""

    def _module(self) -> Any:
        return importlib.import_module(self.package)


class Flash2Backend(FlashBackend):
    """`flash-attn` 2."""

    name = "flash-attn"
    package = FLASH_2
    page = default_block_size = 256

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, metadata: AttentionMetadata, tables: Tensor, **options: Any
    ) -> Tensor:
        decode = metadata.max_query_len <= 1
        if decode and len(q) == len(tables):  # sequence i has token i; padding comes last
            out: Tensor = self._module().flash_attn_with_kvcache(
                q[:, None], k, v, cache_seqlens=metadata.seq_lens, block_table=tables, **options
            )
            return out[:, 0]
        key_start = F.pad(metadata.seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
        varlen: Tensor = self._module().flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q=metadata.query_start,
            cu_seqlens_k=key_start,
            # At 1 the package takes for granted that there is a token for each sequence.
            max_seqlen_q=max(metadata.max_query_len, 2),
            max_seqlen_k=metadata.max_seq_len,
            block_table=tables,
            **options,
        )
        return varlen


class Flash3Backend(FlashBackend):
    """FlashAttention 3, for Hopper cards."""

    name = "flash-attn-3"
    package = FLASH_3
    page = default_block_size = 16

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, metadata: AttentionMetadata, tables: Tensor, **options: Any
    ) -> Tensor:
        out: Tensor = self._module().flash_attn_with_kvcache(
            q,
            k,
            v,
            cache_seqlens=metadata.seq_lens,
            page_table=tables,
            cu_seqlens_q=metadata.query_start,
            max_seqlen_q=metadata.max_query_len,
            **options,
        )
        return out
