"""Low-rank adapters: x A for the tokens of each adapter, and that times B onto the layer's output.

A program does a tile of tokens of one adapter, so each of its matrices is read once a tile. `order` and `tiles` are
those of `kernels.lora.LoraTokens`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.lora import COLUMNS, TILE, LoraTokens, LoraWeights

_DEPTH = 64
"""Inputs that a product takes at a time."""


@triton.jit
def _lora_low_kernel(x, a, low, order, tiles, k, width, x_row, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    tile = tiles + tl.program_id(0) * 3
    slot, begin, end = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    at = begin + tl.arange(0, M)
    there = at < end
    token = tl.load(order + at, mask=there, other=0).to(tl.int64)
    column = tl.program_id(1) * N + tl.arange(0, N)  # width is a multiple of N
    depth = tl.arange(0, K)
    rows = x + token[:, None] * x_row + depth[None, :]
    weights = a + slot * k * width + depth[:, None] * width + column[None, :]
    total = tl.zeros((M, N), dtype=tl.float32)
    for start in range(0, k, K):
        inside = depth < k - start
        values = tl.load(rows + start, mask=there[:, None] & inside[None, :], other=0.0)
        weight = tl.load(weights + start * width, mask=inside[:, None], other=0.0)
        total = tl.dot(values, weight, total, input_precision="ieee")
    tl.store(low + at[:, None] * width + column[None, :], total, mask=there[:, None])


@triton.jit
def _lora_high_kernel(
    low, b, y, order, tiles, columns, n, width, y_row, M: tl.constexpr, N: tl.constexpr, R: tl.constexpr
):
    tile = tiles + tl.program_id(0) * 3
    slot, begin, end = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    at = begin + tl.arange(0, M)
    there = at < end
    token = tl.load(order + at, mask=there, other=0).to(tl.int64)
    block = columns + tl.program_id(1) * 3
    part, first, last = tl.load(block), tl.load(block + 1), tl.load(block + 2)
    column = first + tl.arange(0, N)
    inside = there[:, None] & (column < last)[None, :]
    rank = tl.arange(0, 16)
    dtype = y.dtype.element_ty
    to = y + token[:, None] * y_row + column[None, :]
    total = tl.load(to, mask=inside, other=0.0).to(tl.float32)
    for start in range(0, R, 16):
        values = tl.load(low + at[:, None] * width + part * R + start + rank[None, :], mask=there[:, None], other=0.0)
        weight = tl.load(
            b + (slot * R + start + rank[:, None]) * n + column[None, :], mask=(column < last)[None, :], other=0.0
        )
        total = tl.dot(values.to(dtype), weight, total, input_precision="ieee")
    tl.store(to, total, mask=inside)


def add_lora(y: Tensor, x: Tensor, weights: LoraWeights, tokens: LoraTokens) -> None:
    """As `kernels.lora.add_lora`."""
    tiles, width = len(tokens.tiles), weights.a.shape[2]
    if not tiles:
        return
    low = torch.empty(len(tokens.tokens), width, dtype=torch.float32, device=x.device)
    block = 32 if width % 32 == 0 else 16
    _lora_low_kernel[(tiles, width // block)](
        x, weights.a, low, tokens.tokens, tokens.tiles, x.shape[1], width, x.stride(0),
        M=TILE, N=block, K=_DEPTH, num_warps=2,
    )  # fmt: skip
    _lora_high_kernel[(tiles, len(weights.columns))](
        low, weights.b, y, tokens.tokens, tokens.tiles, weights.columns, y.shape[1], width, y.stride(0),
        M=TILE, N=COLUMNS, R=weights.rank, num_warps=2,
    )  # fmt: skip
