"""Paged attention in plain torch: the definition that the fast backends are tested against.

Gathers each sequence's KV by its block table and computes the softmax in float32. Right on every device and for
every block size; slow, since it works sequence by sequence.
"""

import torch
from torch import Tensor

from kernels.attention.backend import AttentionBackend, scale_width
from kernels.attention.metadata import AttentionMetadata
from kernels.quantized_linear import quantize
from kernels.zeros import lazy_zeros


class TorchBackend(AttentionBackend):
    """K and V: [num_blocks, block_size, kv_heads, head_dim], in int8 4 more, the bytes of a float32 scale."""

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
        k_cache.flatten(0, 1)[where] = _stored(k[kept], k_cache.dtype)
        v_cache.flatten(0, 1)[where] = _stored(v[kept], v_cache.dtype)

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
        block_size = k_cache.shape[1]
        starts, lengths = metadata.query_start.tolist(), metadata.seq_lens.tolist()
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        for i, (length, row) in enumerate(zip(lengths, metadata.rows.tolist(), strict=True)):
            first, last = starts[i], starts[i + 1]
            if first == last:
                continue
            blocks = metadata.block_tables[row, : -(-length // block_size)].long()
            keys = _loaded(k_cache[blocks].flatten(0, 1)[:length])
            values = _loaded(v_cache[blocks].flatten(0, 1)[:length])
            out[first:last] = causal_attention(q[first:last], keys, values, scale, window, soft_cap)
        return out


def _stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype is not torch.int8:
        return x.to(dtype)
    values, scale = quantize(x.float())
    return torch.cat((values.to(torch.int8), scale.view(torch.int8)), dim=-1)


def _loaded(x: Tensor) -> Tensor:
    if x.dtype is not torch.int8:
        return x
    scale = x[..., -4:].contiguous().view(torch.float32)
    return x[..., :-4].float() * scale


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
