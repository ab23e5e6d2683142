"""Random paged batches for the attention tests: the same tokens laid out for any backend."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention import AttentionBackend, AttentionMetadata


@dataclass
class PagedBatch:
    """One layer of a step with its KV written. keys[i], values[i]: [seq_lens[i], kv_heads, head_dim]."""

    q: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    k_cache: Tensor
    v_cache: Tensor
    metadata: AttentionMetadata


def paged_batch(
    backend: AttentionBackend,
    seq_lens: list[int],
    query_lens: list[int],
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    padding_tokens: int = 0,
    poison: bool = True,
) -> PagedBatch:
    """Blocks and rows in shuffled order. poison: slots that no sequence owns hold NaN, as stale memory may."""
    g = torch.Generator().manual_seed(0)
    counts = [-(-length // block_size) for length in seq_lens]
    total = sum(counts) + 2
    free = torch.randperm(total, generator=g).tolist()
    rows = torch.randperm(len(seq_lens) + 2, generator=g)[: len(seq_lens)].int()
    block_tables = torch.zeros(len(seq_lens) + 2, max([*counts, 1]), dtype=torch.int32)
    k_cache, v_cache = backend.kv_cache(total, block_size, kv_heads, head_dim, torch.float32, "cpu")
    if poison:
        nan = float("nan") if k_cache.is_floating_point() else -1  # four bytes of -1 are a NaN where a scale is
        k_cache.fill_(nan)
        v_cache.fill_(nan)
    keys, values = [], []
    for row, length, count in zip(rows.tolist(), seq_lens, counts, strict=True):
        block_tables[row, :count] = torch.tensor([free.pop() for _ in range(count)], dtype=torch.int32)
        keys.append(torch.randn(length, kv_heads, head_dim, generator=g))
        values.append(torch.randn(length, kv_heads, head_dim, generator=g))
        backend.write(keys[-1], values[-1], k_cache, v_cache, slots_of(block_tables[row], length, block_size))
    query_start = torch.tensor([0, *query_lens]).cumsum(0).int()
    tokens = int(query_start[-1]) + padding_tokens
    metadata = AttentionMetadata(
        query_start=query_start,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_tables=block_tables,
        rows=rows,
        slots=torch.full((tokens,), -1),
        max_query_len=max([*query_lens, 0]),
        max_seq_len=max([*seq_lens, 0]),
    )
    return PagedBatch(torch.randn(tokens, heads, head_dim, generator=g), keys, values, k_cache, v_cache, metadata)


def slots_of(row: Tensor, length: int, block_size: int) -> Tensor:
    positions = torch.arange(length)
    return row.long()[positions // block_size] * block_size + positions % block_size
