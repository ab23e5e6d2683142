"""top_k, top_p and min_p in Triton, as one threshold of a row (`kernels.sampler.lowest_kept` is the definition).

It is found without a sort, by bisection on the bits of the logits, whose order is that of whole numbers:

  1. one pass over the row keeps the highest logit of each of LANES interleaved parts; the K-th highest of these is a
     lower bound of the K-th highest of the row, and nearly it;
  2. a second pass gathers what is above the bound, a few hundred candidates, and sums the row's mass;
  3. both filters are bisected among the candidates, or, where these do not reach far enough, in the row itself.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

LANES = 4096
CANDIDATES = 512
"""Lanes whose best logit is above the bound, where top_k asks for no more."""


@triton.jit
def _ordered(x):
    """float32 -> int32 in the same order, so that halves of an interval hold half of the numbers in it."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _unordered(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def scaled(row, at, inside, temperature):
    return tl.div_rn(tl.load(row + at, mask=inside, other=float("-inf")).to(tl.float32), temperature)


@triton.jit
def _above(values, n, threshold, best, temperature, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """How many of n values, or what mass exp(value - best) of them, is at or above the threshold."""
    at = tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], tl.float32)
    for first in range(0, n, BLOCK):
        x = scaled(values, first + at, first + at < n, temperature)
        weight = tl.exp(x - best) if MASS else 1.0
        sums += tl.where(x >= threshold, weight, 0.0)
    return tl.sum(sums, axis=0)


@triton.jit
def _highest_with(values, n, low, best, wanted, temperature, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The highest threshold from `low` on with at least `wanted` above it; `low` itself must have that."""
    bottom, top = _ordered(low).to(tl.int64), _ordered(best).to(tl.int64)
    while bottom < top:
        middle = (bottom + top + 1) >> 1
        if _above(values, n, _unordered(middle.to(tl.int32)), best, temperature, MASS, BLOCK) >= wanted:
            bottom = middle
        else:
            top = middle - 1
    return _unordered(bottom.to(tl.int32))


@triton.jit
def _threshold_kernel(logits, rows, temperatures, top_ks, top_ps, min_ps, scratch, thresholds, vocab, logits_row,
                      CANDIDATES: tl.constexpr, LANES: tl.constexpr):  # fmt: skip
    """scratch: float32 [n, 2 * LANES]: the lanes' best, then the candidates."""
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + i)
    temperature = tl.load(temperatures + row)
    k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row)
    min_p = tl.load(min_ps + row)
    by_k = (k > 0) & (k < vocab)
    if (temperature == 0.0) | ((not by_k) & (top_p >= 1.0) & (min_p <= 0.0)):
        tl.store(thresholds + i, float("-inf"))
        return
    values = logits + i * logits_row
    lane = tl.arange(0, LANES)
    lanes = tl.full([LANES], float("-inf"), tl.float32)
    for first in range(0, vocab, LANES):
        lanes = tl.maximum(lanes, scaled(values, first + lane, first + lane < vocab, temperature))
    best = tl.max(lanes, axis=0)
    low = tl.full([], float("-inf"), tl.float32)
    if min_p > 0.0:
        low = best + tl.log(min_p)
    best_of_lanes = scratch + i * 2 * LANES
    found = best_of_lanes + LANES
    tl.store(best_of_lanes + lane, lanes)
    tl.debug_barrier()  # the lanes are read by other threads than wrote them
    reach = tl.minimum(tl.where(by_k, k, CANDIDATES), LANES).to(tl.float32)
    bound = _highest_with(best_of_lanes, LANES, tl.min(lanes, axis=0), best, reach, 1.0, False, LANES)

    count = 0
    masses = tl.zeros([LANES], tl.float32)
    for first in range(0, vocab, LANES):
        x = scaled(values, first + lane, first + lane < vocab, temperature)
        masses += tl.where(x >= low, tl.exp(x - best), 0.0)
        taken = ((x >= bound) & (first + lane < vocab)).to(tl.int32)
        place = count + tl.cumsum(taken, axis=0) - 1
        tl.store(found + place, x, mask=(taken > 0) & (place < LANES))
        count += tl.sum(taken, axis=0)
    mass = tl.sum(masses, axis=0)
    tl.debug_barrier()
    fits = count <= LANES

    if by_k:
        if fits & (count >= k):
            kth = _highest_with(found, count, bound, best, k.to(tl.float32), 1.0, False, LANES)
        else:
            lowest = tl.full([], float("-inf"), tl.float32)
            kth = _highest_with(values, vocab, lowest, best, k.to(tl.float32), temperature, False, LANES)
        low = tl.maximum(low, kth)
        if top_p < 1.0:
            mass = _above(values, vocab, low, best, temperature, True, LANES)
    if top_p < 1.0:
        start = tl.maximum(low, bound)
        reaches = fits
        if fits:
            reaches = _above(found, count, start, best, 1.0, True, LANES) >= top_p * mass
        if reaches:
            nucleus = _highest_with(found, count, start, best, top_p * mass, 1.0, True, LANES)
        else:
            nucleus = _highest_with(values, vocab, low, best, top_p * mass, temperature, True, LANES)
        low = tl.maximum(low, nucleus)
    tl.store(thresholds + i, tl.minimum(low, best))


def thresholds(
    logits: Tensor, rows: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """logits: [n, vocab]; rows: int64 [n] of the parameters, each [rows] -> float32 [n].

    Logits over temperature below it are filtered out; -inf for rows that are greedy or have no filters.
    """
    n, vocab = logits.shape
    found = torch.empty(n, dtype=torch.float32, device=logits.device)
    scratch = torch.empty(n, 2 * LANES, dtype=torch.float32, device=logits.device)
    _threshold_kernel[(n,)](
        logits, rows, temperature, top_k, top_p, min_p, scratch, found, vocab, logits.stride(0), CANDIDATES=CANDIDATES,
        LANES=LANES, num_warps=16, maxnreg=128,  # left alone, ptxas aims at 64 registers and spills
    )  # fmt: skip
    return found
