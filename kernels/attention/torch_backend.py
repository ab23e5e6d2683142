"""Paged attention in plain torch: the definition that the fast backends are tested against.

Gathers each sequence's KV by its block table and computes the softmax in float32. Right on every device and for
every block size; slow, since it works sequence by sequence.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.attention.backend import FP8, FP8_MAX, AttentionBackend, scale_width
from kernels.attention.metadata import AttentionMetadata
from kernels.quantized_linear import TINY
from kernels.zeros import lazy_zeros


class TorchBackend(AttentionBackend):
    """K and V: [num_blocks, block_size, kv_heads, head_dim], in 8 bits 4 more, the bytes of a float32 scale."""

    name = "torch"
    default_block_size = 16

    def supports_block_size(self, block_size: int) -> bool:
        return block_size >= 1

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
        shape = (num_blocks, block_size, num_kv_heads, head_dim + scale_width(stored))
        return lazy_zeros(shape, stored, device), lazy_zeros(shape, stored, device)

    def write(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        kept = slots >= 0
        where = slots[kept]
        for new, cache in ((k, k_cache), (v, v_cache)):
            stored = _stored(new[kept], cache.dtype)
            # torch indexes no tensor of float8, so 8 bits are written as bytes.
            _bytes(cache).flatten(0, 1)[where] = stored

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
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        for queries, blocks, length in sequences(metadata, k_cache.shape[1]):
            keys, values = (
                _loaded(_bytes(cache)[blocks].flatten(0, 1)[:length].view(cache.dtype)) for cache in (k_cache, v_cache)
            )
            out[queries] = causal_attention(q[queries], keys, values, scale, window, soft_cap)
        return out


def sequences(metadata: AttentionMetadata, block_size: int) -> Iterator[tuple[slice, Tensor, int]]:
    """Yield (queries, blocks, length) of each sequence that has queries: which rows of q, and int64 [its blocks]."""
    starts, lengths = metadata.query_start.tolist(), metadata.seq_lens.tolist()
    for first, last, length, row in zip(starts[:-1], starts[1:], lengths, metadata.rows.tolist(), strict=True):
        if first < last:
            yield slice(first, last), metadata.block_tables[row, : -(-length // block_size)].long(), length


def _stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    if not scale_width(dtype):
        return x.to(dtype)
    values, scale = (_quantize_fp8 if dtype is FP8 else _quantize_int8)(x.float())
    return torch.cat((values.to(dtype).view(torch.uint8), scale.view(torch.uint8)), dim=-1)


def _bytes(cache: Tensor) -> Tensor:
    return cache.view(torch.uint8) if scale_width(cache.dtype) else cache


def _loaded(x: Tensor) -> Tensor:
    if not scale_width(x.dtype):
        return x
    scale = x[..., -4:].contiguous().view(torch.float32)
    return x[..., :-4].float() * scale


def _quantize_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x: float32 [..., n] -> (values up to FP8_MAX, not yet rounded, scale [..., 1])."""
    return _scaled(x, FP8_MAX)


def _quantize_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x: float32 [..., n] -> (whole numbers from -127 to 127, still float32, scale [..., 1])."""
    values, scale = _scaled(x, 127.0)
    return values.round_(), scale  # halves go to even


def _scaled(x: Tensor, most: float) -> tuple[Tensor, Tensor]:
    top = x.abs().amax(-1, keepdim=True)
    # full_like: torch turns number / tensor into a reciprocal and a product, rounded twice.
    inverse = torch.where(top > TINY, torch.full_like(top, most) / top, 0.0)
    return x * inverse, top / most


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int = 0, soft_cap: float = 0.0) -> Tensor:
    """One sequence. q: [queries, heads, head_dim], the last of the positions of
    k, v: [length, kv_heads, head_dim] -> [queries, heads, head_dim], of q's type.

    window, soft_cap: as in `AttentionBackend.attend`.
    """
    queries, heads, head_dim = q.shape
    length, kv_heads = k.shape[:2]
    grouped = q.float().view(queries, kv_heads, heads // kv_heads, head_dim)
    scores = torch.einsum("qhgd,khd->hgqk", grouped, k.float()) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    position = torch.arange(length - queries, length, device=q.device)
    before = position[:, None] - torch.arange(length, device=q.device)  # [queries, length]
    hidden = before < 0
    if window:
        hidden |= before >= window
    weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    return torch.einsum("hgqk,khd->qhgd", weights, v.float()).reshape(q.shape).to(q.dtype)
