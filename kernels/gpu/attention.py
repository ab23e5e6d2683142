"""Paged attention for batches that mix decodes and prompts: one kernel, tiled over queries, with a split-KV form.

A program takes BLOCK_Q consecutive queries of one sequence with all query heads of one KV head as the rows of a matrix
(so KV is read once a group, and a decode has a tile for the tensor cores), and goes over the keys that they see with
the online softmax of FlashAttention (Dao et al., 2022). Which sequence a tile belongs to is found by bisection in
query_start: sequence i owns the tiles from query_start[i] // BLOCK_Q + i on, so the grid depends on padded sizes alone
and a captured launch fits every step (after vLLM's unified Triton kernel). Where there are few programs, the keys of
each sequence are split among several, and a second kernel merges their parts (Flash-Decoding, Dao et al., 2023).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention.metadata import AttentionMetadata
from kernels.gpu.attention_tiles import Tiles
from kernels.gpu.kv_formats import PLAIN, decode, decoded_scale

_LOG2E = 1.4426950408889634


@triton.jit
def _sequence_of(tile, query_start, num_seqs, BLOCK_Q: tl.constexpr):
    """The last sequence whose first tile is not after this one."""
    low, high = 0, num_seqs - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(query_start + middle) // BLOCK_Q + middle <= tile:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def _keys_or_values(cache, scales, blocks, positions, kv_head, inside, dtype: tl.constexpr, MASKED: tl.constexpr,
                    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
                    PAGE: tl.constexpr, FORMAT: tl.constexpr):  # fmt: skip
    """-> ([BLOCK_N, BLOCK_D] of dtype, scales [BLOCK_N])."""
    at = tl.arange(0, BLOCK_D)
    page = (blocks.to(tl.int64) * KV_HEADS + kv_head) * PAGE
    row = positions % BLOCK_SIZE
    where = cache + (page + row * HEAD_DIM)[:, None] + at[None, :]
    # Slots past the end may hold anything, a NaN too, which a weight of zero would let through.
    if MASKED and BLOCK_D == HEAD_DIM:
        tile = tl.load(where, mask=inside[:, None], other=0.0)
    elif MASKED:
        tile = tl.load(where, mask=inside[:, None] & (at < HEAD_DIM)[None, :], other=0.0)
    elif BLOCK_D == HEAD_DIM:
        tile = tl.load(where)
    else:
        tile = tl.load(where, mask=(at < HEAD_DIM)[None, :], other=0.0)
    scale = inside
    if FORMAT != PLAIN:
        place = scales + (page + BLOCK_SIZE * HEAD_DIM) // 4 + row
        scale = decoded_scale(tl.load(place, mask=inside, other=0.0), FORMAT)
    return decode(tile, dtype, FORMAT), scale


@triton.jit
def _attend_keys(first, queries, q_positions, end, weighted, total, highest, k_cache, v_cache, k_scales, v_scales,
                 table, kv_head, scale, soft_cap, window, MASKED: tl.constexpr, KV_HEADS: tl.constexpr,
                 HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr,
                 PAGE: tl.constexpr, FORMAT: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
                 DOT: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """One step over BLOCK_N keys: the running (weighted values, sum of weights, highest score) of every row."""
    dtype: tl.constexpr = queries.dtype if DOT else tl.float32
    positions = first + tl.arange(0, BLOCK_N)
    inside = positions < end
    if MASKED:
        blocks = tl.load(table + positions // BLOCK_SIZE, mask=inside, other=0)
    else:
        blocks = tl.load(table + positions // BLOCK_SIZE)
    keys, k_scale = _keys_or_values(k_cache, k_scales, blocks, positions, kv_head, inside, dtype, MASKED,
        KV_HEADS, HEAD_DIM, BLOCK_D, BLOCK_SIZE, PAGE, FORMAT)  # fmt: skip
    if DOT:
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    else:
        scores = tl.sum(queries.to(tl.float32)[:, None, :] * keys[None, :, :], axis=2)
    if FORMAT != PLAIN:
        scores *= k_scale[None, :]
    scores *= scale  # of base 2 but under a cap
    if SOFT_CAP:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1), and right at both ends.
        bounded = 1.0 - 2.0 / (tl.exp(scores * (2.0 / soft_cap)) + 1.0)
        scores = bounded * soft_cap * 1.4426950408889634
    if MASKED:
        seen = inside[None, :] & (positions[None, :] <= q_positions[:, None])
        if WINDOW:
            seen &= q_positions[:, None] - positions[None, :] < window
        scores = tl.where(seen, scores, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, axis=1))
    # A row that has seen no key yet has no highest score to take off.
    base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    kept = tl.exp2(highest - base)
    weights = tl.exp2(scores - base[:, None])
    total = total * kept + tl.sum(weights, axis=1)
    values, v_scale = _keys_or_values(v_cache, v_scales, blocks, positions, kv_head, inside, dtype, MASKED,
        KV_HEADS, HEAD_DIM, BLOCK_D, BLOCK_SIZE, PAGE, FORMAT)  # fmt: skip
    if FORMAT != PLAIN:
        weights *= v_scale[None, :]
    weighted *= kept[:, None]
    if DOT:
        weighted = tl.dot(weights.to(dtype), values, weighted, input_precision=PRECISION)
    else:
        weighted += tl.sum(weights[:, :, None] * values[None, :, :], axis=1)
    return weighted, total, new_highest


@triton.jit(do_not_specialize=["num_seqs", "num_tokens", "window", "table_row"])
def _attention_kernel(
    q, k_cache, v_cache, k_scales, v_scales, out, part_values, part_stats,
    query_start, seq_lens, block_tables, rows, num_seqs, num_tokens, scale, soft_cap, window,
    q_token, q_head, table_row,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, PAGE: tl.constexpr,
    FORMAT: tl.constexpr, DECODE: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, DOT: tl.constexpr,
    PRECISION: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    tile, kv_head, split, splits = tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    heads: tl.constexpr = KV_HEADS * GROUP
    row = tl.arange(0, BLOCK_M)
    at = tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + row % GROUP
    in_tile = row < BLOCK_Q * GROUP
    used = tl.load(query_start + num_seqs)
    if not SPLIT and (tile + 1) * BLOCK_Q > used:
        # Tokens that belong to no sequence get zeros from the program of their place.
        token = tile * BLOCK_Q + row // GROUP
        where = out + (token.to(tl.int64) * heads + head)[:, None] * HEAD_DIM + at[None, :]
        padding = in_tile & (token >= used) & (token < num_tokens)
        tl.store(where, tl.zeros([BLOCK_M, BLOCK_D], out.dtype.element_ty),
                 mask=padding[:, None] & (at < HEAD_DIM)[None, :])  # fmt: skip

    sequence = tile
    begin = 0
    if DECODE:
        sequence = tl.minimum(tile, num_seqs - 1)
        if tile >= num_seqs:
            begin = 1
    else:
        sequence = _sequence_of(tile, query_start, num_seqs, BLOCK_Q)
        begin = (tile - tl.load(query_start + sequence) // BLOCK_Q - sequence) * BLOCK_Q
    first_token = tl.load(query_start + sequence)
    num_queries = tl.load(query_start + sequence + 1) - first_token
    if begin >= num_queries:
        return
    length = tl.load(seq_lens + sequence)
    query = begin + row // GROUP
    token = (first_token + query).to(tl.int64)
    live = in_tile & (query < num_queries)
    q_positions = length - num_queries + query
    q_inside = live[:, None] & (at < HEAD_DIM)[None, :]
    queries = tl.load(q + token[:, None] * q_token + head[:, None] * q_head + at[None, :], mask=q_inside, other=0.0)

    low = length - num_queries + begin  # the first query's position
    end = tl.minimum(low + BLOCK_Q, length)
    first_key = 0
    if WINDOW:
        first_key = tl.maximum(low - window + 1, 0) // BLOCK_N * BLOCK_N
    last_key = end
    if SPLIT:
        share = tl.cdiv(tl.cdiv(end - first_key, BLOCK_N), splits) * BLOCK_N
        first_key += split * share
        last_key = tl.minimum(first_key + share, end)

    weighted = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    table = block_tables + tl.load(rows + sequence).to(tl.int64) * table_row
    masked_from = first_key
    if not DECODE and not WINDOW:
        # Keys up to the first query's are seen by every row of the tile.
        masked_from = tl.maximum(first_key, tl.minimum(low + 1, last_key) // BLOCK_N * BLOCK_N)
        for first in range(first_key, masked_from, BLOCK_N):
            weighted, total, highest = _attend_keys(first, queries, q_positions, end, weighted, total, highest,
                k_cache, v_cache, k_scales, v_scales, table, kv_head, scale, soft_cap, window, False, KV_HEADS,
                HEAD_DIM, BLOCK_D, BLOCK_N, BLOCK_SIZE, PAGE, FORMAT, WINDOW, SOFT_CAP, DOT, PRECISION)  # fmt: skip
    for first in range(masked_from, last_key, BLOCK_N):
        weighted, total, highest = _attend_keys(first, queries, q_positions, end, weighted, total, highest,
            k_cache, v_cache, k_scales, v_scales, table, kv_head, scale, soft_cap, window, True, KV_HEADS,
            HEAD_DIM, BLOCK_D, BLOCK_N, BLOCK_SIZE, PAGE, FORMAT, WINDOW, SOFT_CAP, DOT, PRECISION)  # fmt: skip

    place = token * heads + head
    if not SPLIT:
        result = weighted / total[:, None]
        tl.store(out + place[:, None] * HEAD_DIM + at[None, :], result, mask=q_inside)
    else:
        place = place * splits + split
        tl.store(part_values + place[:, None] * HEAD_DIM + at[None, :], weighted, mask=q_inside)
        tl.store(part_stats + place * 2, total, mask=live)
        tl.store(part_stats + place * 2 + 1, highest, mask=live)


@triton.jit(do_not_specialize=["num_seqs"])
def _merge_kernel(part_values, part_stats, query_start, out, num_seqs, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
                  BLOCK_D: tl.constexpr, SPLITS: tl.constexpr):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    place = token * HEADS + tl.program_id(1)
    at = tl.arange(0, BLOCK_D)
    result = tl.zeros([BLOCK_D], tl.float32)
    if token < tl.load(query_start + num_seqs):
        split = place * SPLITS + tl.arange(0, SPLITS)
        total = tl.load(part_stats + split * 2)
        highest = tl.load(part_stats + split * 2 + 1)
        share = tl.exp2(highest - tl.max(highest, axis=0))
        values = tl.load(part_values + split[:, None] * HEAD_DIM + at[None, :],
                         mask=(share > 0)[:, None] & (at < HEAD_DIM)[None, :], other=0.0)  # fmt: skip
        result = tl.sum(values * share[:, None], axis=0) / tl.sum(total * share, axis=0)
    tl.store(out + place * HEAD_DIM + at, result, mask=at < HEAD_DIM)


def attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    window: int,
    soft_cap: float,
    tiles: Tiles,
    splits: int,
    kv_format: int,
) -> Tensor:
    """As `AttentionBackend.attend`, on a cache as `kernels.gpu.kv_write` makes it.

    tiles: of `attention_tiles`; tiles.decode needs a max_query_len of 1. splits: parts of each sequence's keys, a power
    of two.
    """
    tokens, heads, head_dim = q.shape
    num_seqs = len(metadata.seq_lens)
    if tokens == 0 or num_seqs == 0:
        return torch.zeros_like(q, memory_format=torch.contiguous_format)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    kv_heads, block_size, width = k_cache.shape[1:]
    group = heads // kv_heads
    block_q = 1 if tiles.decode else tiles.block_m // group
    k_scales = v_scales = None
    if kv_format != PLAIN.value:
        k_scales, v_scales = k_cache.view(torch.float32), v_cache.view(torch.float32)
        k_cache, v_cache = (cache.view(torch.int8 if cache.dtype is torch.int8 else torch.uint8)
                            for cache in (k_cache, v_cache))  # fmt: skip
    values = stats = None
    if splits > 1:
        values = torch.empty(tokens, heads, splits, head_dim, dtype=torch.float32, device=q.device)
        stats = torch.empty(tokens, heads, splits, 2, dtype=torch.float32, device=q.device)
    block_d = triton.next_power_of_2(head_dim)
    grid = (max(num_seqs, tokens) if tiles.decode else tokens // block_q + num_seqs, kv_heads, splits)
    _attention_kernel[grid](
        q, k_cache, v_cache, k_scales, v_scales, out, values, stats,
        metadata.query_start, metadata.seq_lens, metadata.block_tables, metadata.rows, num_seqs, tokens,
        scale if soft_cap else scale * _LOG2E, soft_cap, window, q.stride(0), q.stride(1),
        metadata.block_tables.stride(0),
        KV_HEADS=kv_heads, GROUP=group, HEAD_DIM=head_dim, BLOCK_D=block_d, BLOCK_Q=block_q, BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n, BLOCK_SIZE=block_size, PAGE=block_size * width, FORMAT=kv_format, DECODE=tiles.decode,
        WINDOW=window > 0, SOFT_CAP=soft_cap > 0, DOT=tiles.dot, PRECISION=tiles.precision, SPLIT=splits > 1,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    if values is not None:
        _merge_kernel[(tokens, heads)](
            values, stats, metadata.query_start, out, num_seqs, HEADS=heads, HEAD_DIM=head_dim, BLOCK_D=block_d,
            SPLITS=splits, num_warps=2,
        )  # fmt: skip
    return out
