"""Grouped products for a mixture of experts: rows are sorted by expert on the device, and each tile is of one expert.

The grid is as large as any routing can need: an expert's last tile may be part empty, so there are at most one more
tile an expert than whole tiles. A program finds its expert from the counts; those behind the last tile end at once.
(After vLLM's fused MoE and MegaBlocks, Gale et al., 2022.)
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import gpu
from kernels.gpu import Gpu

_PAIRS = 1024
"""Pairs of a token and an expert that the sort looks at together."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """block_m: pairs; block_n: output features (of gate and of up each); block_k: input features."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int


def choose_tiles(card: Gpu, pairs: int, num_experts: int, dtype: torch.dtype) -> Tiles:
    """By the pairs that an expert gets on average; a decode step's few leave most of a tile empty, and read weights."""
    if dtype is torch.float32:
        return Tiles(16, 32, 32, 4, 2)
    roomy = card.capability in ((8, 0), (9, 0), (10, 0))
    if pairs <= 32 * num_experts:
        return Tiles(16, 32, 128 if roomy else 64, 4, 4 if roomy else 3)
    return Tiles(64, 64, 64, 4, 3 if roomy else 2)


@triton.jit(do_not_specialize=["pairs"])
def _sort_kernel(chosen, counts, order, pairs, BLOCK: tl.constexpr):
    """Each program lists one expert's pairs, in order, behind those of the experts before it."""
    expert = tl.program_id(0)
    before = 0
    mine = 0
    for start in range(0, pairs, BLOCK):
        at = start + tl.arange(0, BLOCK)
        to = tl.load(chosen + at, mask=at < pairs, other=2147483647)
        before += tl.sum((to < expert).to(tl.int32), axis=0)
        mine += tl.sum((to == expert).to(tl.int32), axis=0)
    tl.store(counts + expert, mine)
    for start in range(0, pairs, BLOCK):
        at = start + tl.arange(0, BLOCK)
        is_mine = tl.load(chosen + at, mask=at < pairs, other=2147483647) == expert
        rank = tl.cumsum(is_mine.to(tl.int32), axis=0) - 1
        tl.store(order + before + rank, at, mask=is_mine)
        before += tl.sum(is_mine.to(tl.int32), axis=0)


@triton.jit
def _tile_of(tile, counts, num_experts, BLOCK_M: tl.constexpr, EXPERTS: tl.constexpr):
    """-> the expert of a tile, its first pair in the order, and the end of its pairs; no expert: num_experts."""
    experts = tl.arange(0, EXPERTS)
    count = tl.load(counts + experts, mask=experts < num_experts, other=0)
    tiles = (count + BLOCK_M - 1) // BLOCK_M
    # The experts whose tiles all come before this one; those without pairs do as well.
    ends = tl.cumsum(tiles, axis=0)
    done = (ends <= tile) & (experts < num_experts)
    expert = tl.sum(done.to(tl.int32), axis=0)
    start = tl.sum(tl.where(experts < expert, count, 0), axis=0)
    first_tile = tl.sum(tl.where(experts < expert, tiles, 0), axis=0)
    end = start + tl.sum(tl.where(experts == expert, count, 0), axis=0)
    return expert, start + (tile - first_tile) * BLOCK_M, end


@triton.jit
def _gate_up_kernel(
    x, weight, out, order, counts, x_row, k, inner, per_token, num_experts,
    GELU: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """out: [pairs, inner] = activation(gate) * up, by pair."""
    expert, first, end = _tile_of(tl.program_id(0), counts, num_experts, BLOCK_M, EXPERTS)
    if expert >= num_experts:
        return
    dtype = out.dtype.element_ty
    at = first + tl.arange(0, BLOCK_M)
    there = at < end
    pair = tl.load(order + at, mask=there, other=0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    wide = column < inner
    depth = tl.arange(0, BLOCK_K)
    rows = x + (pair // per_token)[:, None] * x_row + depth[None, :]
    gates = weight + expert.to(tl.int64) * 2 * inner * k + column[None, :].to(tl.int64) * k + depth[:, None]
    gate = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, k, BLOCK_K):
        inside = depth < k - start
        values = tl.load(rows + start, mask=there[:, None] & inside[None, :], other=0.0)
        mask = inside[:, None] & wide[None, :]
        gate = tl.dot(values, tl.load(gates + start, mask=mask, other=0.0), gate, input_precision=PRECISION)
        ups = tl.load(gates + inner * k + start, mask=mask, other=0.0)
        up = tl.dot(values, ups, up, input_precision=PRECISION)
    # Rounded as the plain layer rounds between its products.
    g = gate.to(dtype).to(tl.float32)
    exponent = 1.5957691216057308 * (g + 0.044715 * g * g * g) if GELU else g
    activated = (g / (1.0 + tl.exp(-exponent))).to(dtype).to(tl.float32) * up.to(dtype).to(tl.float32)
    tl.store(out + pair[:, None] * inner + column[None, :], activated, mask=there[:, None] & wide[None, :])


@triton.jit
def _down_kernel(
    x, weight, shares, out, order, counts, k, n, num_experts,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """out: [pairs, n] = share of the pair * x W^T, by pair."""
    expert, first, end = _tile_of(tl.program_id(0), counts, num_experts, BLOCK_M, EXPERTS)
    if expert >= num_experts:
        return
    at = first + tl.arange(0, BLOCK_M)
    there = at < end
    pair = tl.load(order + at, mask=there, other=0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    wide = column < n
    depth = tl.arange(0, BLOCK_K)
    rows = x + pair[:, None] * k + depth[None, :]
    weights = weight + expert.to(tl.int64) * n * k + column[None, :].to(tl.int64) * k + depth[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, k, BLOCK_K):
        inside = depth < k - start
        values = tl.load(rows + start, mask=there[:, None] & inside[None, :], other=0.0)
        matrix = tl.load(weights + start, mask=inside[:, None] & wide[None, :], other=0.0)
        total = tl.dot(values, matrix, total, input_precision=PRECISION)
    share = tl.load(shares + pair, mask=there, other=0.0).to(tl.float32)
    tl.store(out + pair[:, None] * n + column[None, :], total * share[:, None], mask=there[:, None] & wide[None, :])


def experts_mlp(
    x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor, gelu: bool, card: Gpu | None = None
) -> Tensor:
    """As `kernels.experts.experts_mlp`; card: where the tensors lie, if not on it."""
    (tokens, hidden), per_token = x.shape, chosen.shape[1]
    num_experts, inner, pairs = len(gate_up), down.shape[2], chosen.numel()
    if not pairs:
        return torch.zeros_like(x)
    if x.stride(1) != 1:
        x = x.contiguous()
    tiles = choose_tiles(card or gpu.describe(x.device), pairs, num_experts, x.dtype)
    order = torch.empty(pairs, dtype=torch.int32, device=x.device)
    counts = torch.empty(num_experts, dtype=torch.int32, device=x.device)
    _sort_kernel[(num_experts,)](chosen.contiguous(), counts, order, pairs, BLOCK=_PAIRS, num_warps=4)
    most = min(pairs, pairs // tiles.block_m + num_experts)
    blocks = {
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "BLOCK_K": tiles.block_k,
        "EXPERTS": triton.next_power_of_2(num_experts),
        "PRECISION": "tf32x3" if x.dtype is torch.float32 else "ieee",
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
    }
    activated = torch.empty(pairs, inner, dtype=x.dtype, device=x.device)
    _gate_up_kernel[(most, triton.cdiv(inner, tiles.block_n))](
        x, gate_up, activated, order, counts, x.stride(0), hidden, inner, per_token, num_experts, GELU=gelu, **blocks
    )
    out = torch.empty(tokens, per_token, hidden, dtype=x.dtype, device=x.device)
    _down_kernel[(most, triton.cdiv(hidden, tiles.block_n))](
        activated, down, weights.contiguous(), out, order, counts, inner, hidden, num_experts, **blocks
    )
    return out.sum(dim=1)
