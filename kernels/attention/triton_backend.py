"""Paged attention in Triton (`kernels.gpu.attention`), for every NVIDIA GPU from compute capability 7.5 on.

Below 8.0 Triton has no tensor cores for tl.dot: there only decodes run in Triton, and other sequences are gathered and
given to torch's own attention, one by one.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention.backend import FP8, AttentionBackend, HeadNorms, scale_width
from kernels.attention.metadata import AttentionMetadata
from kernels.attention.torch_backend import causal_attention, sequences
from kernels.gpu import Gpu

MIN_CAPABILITY = (7, 5)
MAX_HEAD_DIM = 256
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
KV_DTYPES = (*DTYPES, torch.int8, FP8)


class TritonBackend(AttentionBackend):
    """K and V: [num_blocks, kv_heads, block_size, head_dim].

    The tokens of a block and head lie together, so a program's loads are long. In 8 bits head_dim is 4 more: a page of
    a block and head holds its values as above, then block_size float32 scales. Block sizes are multiples of 16.
    """

    name = "triton"
    default_block_size = 16

    def __init__(self, reason: str = "asked for by name", kv_dtype: torch.dtype | None = None, *, gpu: Gpu) -> None:
        super().__init__(reason, kv_dtype)
        self.gpu = gpu

    @staticmethod
    def supports_model(
        capability: tuple[int, int], dtype: torch.dtype, head_dim: int, kv_dtype: torch.dtype | None = None
    ) -> bool:
        stored = kv_dtype or dtype
        return (
            capability >= MIN_CAPABILITY
            and dtype in DTYPES
            and stored in KV_DTYPES
            and head_dim % 16 == 0
            and 16 <= head_dim <= MAX_HEAD_DIM
        )

    def supports_block_size(self, block_size: int) -> bool:
        return block_size >= 16 and block_size % 16 == 0

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
        if not (
            self.supports_model(self.gpu.capability, dtype, head_dim, stored) and self.supports_block_size(block_size)
        ):
            raise ValueError(
                "the triton attention backend takes float32, bfloat16 or float16, a cache of these, int8 or "
                f"float8_e4m3fn, a head_dim and a block_size that are multiples of 16, a head_dim up to {MAX_HEAD_DIM} "
                f"and cards from compute capability 7.5 on; got {dtype}, a cache of {stored}, head_dim {head_dim}, "
                f"block_size {block_size} and {self.gpu.capability}"
            )
        shape = (num_blocks, num_kv_heads, block_size, head_dim + scale_width(stored))
        return torch.zeros(shape, dtype=stored, device=device), torch.zeros(shape, dtype=stored, device=device)

    def write(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        from kernels.gpu import kv_write

        kv_write.write(k, v, k_cache, v_cache, slots, self._format(k_cache))

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
        from kernels.gpu import attention
        from kernels.gpu.attention_tiles import choose_splits, choose_tiles, has_dot

        if metadata.max_query_len > 1 and not has_dot(self.gpu.capability):
            return gathered_attention(q, k_cache, v_cache, metadata, scale, window, soft_cap)
        heads, kv_heads = q.shape[1], k_cache.shape[1]
        group = heads // kv_heads
        tiles = choose_tiles(self.gpu, q.shape[2], group, metadata.max_query_len, q.dtype, k_cache.dtype)
        rows = len(metadata.seq_lens)
        programs = kv_heads * (rows if tiles.decode else len(q) * group // tiles.block_m + rows)
        longest = min(metadata.max_seq_len, window + 1) if window else metadata.max_seq_len
        splits = choose_splits(self.gpu, programs, longest)
        return attention.attention(
            q, k_cache, v_cache, metadata, scale, window, soft_cap, tiles, splits, self._format(k_cache)
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
        from kernels.gpu import kv_write

        q_weight, k_weight, eps = norms or (None, None, 0.0)
        return kv_write.rotary_write(
            q, k, v, q_weight, k_weight, eps, cos, sin, positions, k_cache, v_cache, slots, self._format(k_cache)
        )

    def _format(self, cache: Tensor) -> int:
        from kernels.gpu.kv_formats import kv_format

        return kv_format(cache.dtype, self.gpu.capability)


def gathered_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
) -> Tensor:
    """As `AttentionBackend.attend` on `TritonBackend`'s layout, in torch, sequence by sequence. Waits for the GPU."""
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    for queries, blocks, length in sequences(metadata, k_cache.shape[2]):
        num_queries = queries.stop - queries.start
        k, v = (_sequence(cache, blocks, length, q.shape[2]).to(q.dtype) for cache in (k_cache, v_cache))
        if soft_cap:
            out[queries] = causal_attention(q[queries], k, v, scale, window, soft_cap)
            continue
        position = torch.arange(length - num_queries, length, device=q.device)
        before = position[:, None] - torch.arange(length, device=q.device)  # [queries, length]
        seen = (before >= 0) & (before < window) if window else before >= 0
        asked, k, v = (x.transpose(0, 1)[None] for x in (q[queries], k, v))  # [1, heads, tokens, head_dim]
        attended = F.scaled_dot_product_attention(asked, k, v, attn_mask=seen, scale=scale, enable_gqa=True)
        out[queries] = attended[0].transpose(0, 1)
    return out


def _sequence(cache: Tensor, blocks: Tensor, length: int, head_dim: int) -> Tensor:
    """[length, kv_heads, head_dim] of one sequence's blocks; 8 bits as float32."""
    block_size = cache.shape[2]
    if not scale_width(cache.dtype):
        return cache[blocks].transpose(1, 2).flatten(0, 1)[:length]
    pages = cache.view(torch.uint8)[blocks].flatten(2)  # [blocks, kv_heads, bytes]
    values = pages[..., : block_size * head_dim].unflatten(2, (block_size, head_dim)).view(cache.dtype).float()
    scales = pages[..., block_size * head_dim :].contiguous().view(torch.float32)  # [blocks, kv_heads, block_size]
    tokens: Tensor = (values * scales[..., None]).transpose(1, 2)  # [blocks, block_size, kv_heads, head_dim]
    return tokens.flatten(0, 1)[:length]
