"""q/k norm, rotary embedding and KV store in one kernel: q, k and v are read once and written once.

A program takes one token and a few heads, either of q or of k and v. Each step rounds to the model's type as the
separate operations do (`kernels.rms_norm`, `kernels.rotary`), so the numbers are theirs. A head is held in three parts:
the two halves of its turned dimensions, and the rest that partial rotary leaves alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.kv_formats import PLAIN, encode, inverse_scale, largest

_TILE = 8  # heads of a program


@triton.jit
def _part(x, heads, first: tl.constexpr, width: tl.constexpr, PADDED: tl.constexpr, num_heads, head_stride):
    """Dimensions first to first + width of each head: float32 [heads, PADDED]."""
    at = tl.arange(0, PADDED)
    inside = (heads < num_heads)[:, None] & (at < width)[None, :]
    return tl.load(x + heads[:, None] * head_stride + first + at[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _weigh(x, factor, weight, first: tl.constexpr, width: tl.constexpr, PADDED: tl.constexpr, dtype: tl.constexpr):
    at = tl.arange(0, PADDED)
    scale = tl.load(weight + first + at, mask=at < width, other=0.0).to(tl.float32)
    return ((x * factor).to(dtype).to(tl.float32) * scale[None, :]).to(dtype).to(tl.float32)


@triton.jit
def _store_part(out, x, inverse, heads, first: tl.constexpr, width: tl.constexpr, PADDED: tl.constexpr, num_heads,
                head_stride, FORMAT: tl.constexpr):  # fmt: skip
    at = tl.arange(0, PADDED)
    inside = (heads < num_heads)[:, None] & (at < width)[None, :]
    where = out + heads[:, None] * head_stride + first + at[None, :]
    if FORMAT == PLAIN:
        tl.store(where, x, mask=inside)
    else:
        tl.store(where, encode(x * inverse[:, None], FORMAT), mask=inside)


@triton.jit
def _load_head(x, heads, num_heads, head_stride, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, HALF_PADDED: tl.constexpr,
               REST_PADDED: tl.constexpr):  # fmt: skip
    first = _part(x, heads, 0, HALF, HALF_PADDED, num_heads, head_stride)
    second = _part(x, heads, HALF, HALF, HALF_PADDED, num_heads, head_stride)
    rest = _part(x, heads, 2 * HALF, HEAD_DIM - 2 * HALF, REST_PADDED, num_heads, head_stride)
    return first, second, rest


@triton.jit
def _normed_and_turned(x, weight, eps, cos, sin, position, heads, num_heads, head_stride, HEAD_DIM: tl.constexpr,
                       HALF: tl.constexpr, HALF_PADDED: tl.constexpr, REST_PADDED: tl.constexpr):  # fmt: skip
    dtype = x.dtype.element_ty
    first, second, rest = _load_head(x, heads, num_heads, head_stride, HEAD_DIM, HALF, HALF_PADDED, REST_PADDED)
    if weight is not None:
        square = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1) + tl.sum(rest * rest, axis=1)
        factor = tl.rsqrt(square / HEAD_DIM + eps)[:, None]
        first = _weigh(first, factor, weight, 0, HALF, HALF_PADDED, dtype)
        second = _weigh(second, factor, weight, HALF, HALF, HALF_PADDED, dtype)
        rest = _weigh(rest, factor, weight, 2 * HALF, HEAD_DIM - 2 * HALF, REST_PADDED, dtype)
    if cos is not None:
        at = tl.arange(0, HALF_PADDED)
        c = tl.load(cos + position * HALF + at, mask=at < HALF, other=0.0)[None, :]
        s = tl.load(sin + position * HALF + at, mask=at < HALF, other=0.0)[None, :]
        turned = first * c - second * s
        second = (second * c + first * s).to(dtype).to(tl.float32)
        first = turned.to(dtype).to(tl.float32)
    return first, second, rest


@triton.jit
def _store_head(cache, scales, first, second, rest, slot, heads, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
                HALF_PADDED: tl.constexpr, REST_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
                HEAD: tl.constexpr, ROW: tl.constexpr, KV_HEADS: tl.constexpr, FORMAT: tl.constexpr):  # fmt: skip
    """BLOCK, HEAD, ROW: steps in the cache to the next block, head and token."""
    page = slot // BLOCK_SIZE * BLOCK
    row = slot % BLOCK_SIZE
    inverse = heads
    if FORMAT != PLAIN:
        top = tl.maximum(tl.max(tl.abs(first), axis=1), tl.max(tl.abs(second), axis=1))
        top = tl.maximum(top, tl.max(tl.abs(rest), axis=1))
        inverse = inverse_scale(top, FORMAT)
        where = scales + (page + heads * HEAD + BLOCK_SIZE * HEAD_DIM) // 4 + row
        tl.store(where, tl.div_rn(top, tl.zeros_like(top) + largest(FORMAT)), mask=heads < KV_HEADS)
    out = cache + page + row * ROW
    _store_part(out, first, inverse, heads, 0, HALF, HALF_PADDED, KV_HEADS, HEAD, FORMAT)
    _store_part(out, second, inverse, heads, HALF, HALF, HALF_PADDED, KV_HEADS, HEAD, FORMAT)
    _store_part(out, rest, inverse, heads, 2 * HALF, HEAD_DIM - 2 * HALF, REST_PADDED, KV_HEADS, HEAD, FORMAT)


@triton.jit
def _rotary_write_kernel(
    q, k, v, q_weight, k_weight, eps, cos, sin, positions, turned, k_cache, v_cache, k_scales, v_scales, slots,
    q_token, q_head, k_token, k_head, v_token, v_head,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr, REST_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
    HEAD: tl.constexpr, ROW: tl.constexpr, FORMAT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    q_tiles: tl.constexpr = (HEADS + TILE - 1) // TILE
    position = token
    if positions is not None:
        position = tl.load(positions + token)
    if tile < q_tiles:
        if q is not None:
            heads = tile * TILE + tl.arange(0, TILE)
            first, second, rest = _normed_and_turned(q + token * q_token, q_weight, eps, cos, sin, position, heads,
                HEADS, q_head, HEAD_DIM, HALF, HALF_PADDED, REST_PADDED)  # fmt: skip
            out = turned + token * HEADS * HEAD_DIM
            _store_part(out, first, heads, heads, 0, HALF, HALF_PADDED, HEADS, HEAD_DIM, PLAIN)
            _store_part(out, second, heads, heads, HALF, HALF, HALF_PADDED, HEADS, HEAD_DIM, PLAIN)
            _store_part(out, rest, heads, heads, 2 * HALF, HEAD_DIM - 2 * HALF, REST_PADDED, HEADS, HEAD_DIM, PLAIN)
    else:
        slot = tl.load(slots + token)
        if slot >= 0:
            heads = (tile - q_tiles) * TILE + tl.arange(0, TILE)
            first, second, rest = _normed_and_turned(k + token * k_token, k_weight, eps, cos, sin, position, heads,
                KV_HEADS, k_head, HEAD_DIM, HALF, HALF_PADDED, REST_PADDED)  # fmt: skip
            _store_head(k_cache, k_scales, first, second, rest, slot, heads, HEAD_DIM, HALF, HALF_PADDED, REST_PADDED,
                BLOCK_SIZE, BLOCK, HEAD, ROW, KV_HEADS, FORMAT)  # fmt: skip
            first, second, rest = _load_head(v + token * v_token, heads, KV_HEADS, v_head, HEAD_DIM, HALF, HALF_PADDED,
                REST_PADDED)  # fmt: skip
            _store_head(v_cache, v_scales, first, second, rest, slot, heads, HEAD_DIM, HALF, HALF_PADDED, REST_PADDED,
                BLOCK_SIZE, BLOCK, HEAD, ROW, KV_HEADS, FORMAT)  # fmt: skip


def rotary_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    kv_format: int,
) -> Tensor:
    """q: [tokens, heads, head_dim], k, v: [tokens, kv_heads, head_dim] -> q normed and turned; k likewise and v stored.

    q_weight, k_weight: [head_dim], of the RMSNorm of each head; None: no norm.
    k_cache, v_cache: [num_blocks, kv_heads, block_size, head_dim], in 8 bits head_dim + 4 and contiguous, with the
    same strides; kv_format: of `kv_formats`.
    """
    turned = torch.empty_like(q, memory_format=torch.contiguous_format)
    _launch(q, k, v, q_weight, k_weight, eps, cos, sin, positions, turned, k_cache, v_cache, slots, kv_format)
    return turned


def write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, kv_format: int) -> None:
    """k and v stored as they are; arguments as in `rotary_write`."""
    _launch(None, k, v, None, None, 0.0, None, None, None, None, k_cache, v_cache, slots, kv_format)


def _launch(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor | None,
    turned: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    kv_format: int,
) -> None:
    tokens, kv_heads, head_dim = k.shape
    if tokens == 0:
        return
    heads = 0 if q is None else q.shape[1]
    half = head_dim // 2 if cos is None else cos.shape[-1]
    block_size = k_cache.shape[2]
    block, head, row, _ = k_cache.stride()
    k_scales = v_scales = None
    if kv_format != PLAIN.value:
        row = head_dim
        k_scales, v_scales = k_cache.view(torch.float32), v_cache.view(torch.float32)
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    strides = [x.stride(i) if x is not None else 0 for x in (q, k, v) for i in (0, 1)]
    grid = (tokens, triton.cdiv(heads, _TILE) + triton.cdiv(kv_heads, _TILE))
    _rotary_write_kernel[grid](
        q, k, v, q_weight, k_weight, eps, cos, sin, positions, turned, k_cache, v_cache, k_scales, v_scales, slots,
        *strides,
        HEADS=heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, HALF=half, HALF_PADDED=triton.next_power_of_2(half),
        REST_PADDED=triton.next_power_of_2(max(head_dim - 2 * half, 1)), BLOCK_SIZE=block_size,
        BLOCK=block, HEAD=head, ROW=row, FORMAT=kv_format, TILE=_TILE, num_warps=2 if head_dim <= 128 else 4,
    )  # fmt: skip
