"""The sampler in Triton (`kernels.sampler` is its definition): no sort, one uniform number a token.

The vocabulary is cut in chunks. One kernel finds each chunk's best logit and its mass above a threshold, with many
programs a row; another takes a row's chunks together and draws: the uniform number picks a chunk by their masses and a
token within it, in vocabulary order. top_k, top_p and min_p only raise the threshold (`kernels.gpu.filters`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.filters import scaled
from kernels.gpu.filters import thresholds as filter_thresholds

CHUNK = 4096


@triton.jit
def _chunk_kernel(logits, rows, temperatures, thresholds, own, best, best_at, mass, above, vocab, logits_row,
                  CHUNK: tl.constexpr):  # fmt: skip
    """Of each chunk: its best logit and where, its mass relative to that, and how many logits are above the own one.

    thresholds, own, mass, above may be None. Logits are divided by the temperature where that is not 0.
    """
    i = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    temperature = 1.0
    if temperatures is not None:
        temperature = tl.load(temperatures + tl.load(rows + i))
        temperature = tl.where(temperature == 0.0, 1.0, temperature)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    row = logits + i * logits_row
    x = scaled(row, at, at < vocab, temperature)
    highest, where = tl.max(x, axis=0, return_indices=True, return_indices_tie_break_left=True)
    place = i * tl.num_programs(1) + chunk
    tl.store(best + place, highest)
    tl.store(best_at + place, chunk * CHUNK + where)
    if mass is not None:
        weights = tl.exp(x - highest)
        if thresholds is not None:
            weights = tl.where(x >= tl.load(thresholds + i), weights, 0.0)
        tl.store(mass + place, tl.where(highest == float("-inf"), 0.0, tl.sum(weights, axis=0)))
    if own is not None:
        value = tl.load(row + tl.load(own + i)).to(tl.float32)
        tl.store(above + place, tl.sum((x > value).to(tl.int32), axis=0))


@triton.jit
def _best_kernel(best, best_at, tokens, CHUNKS: tl.constexpr, PADDED: tl.constexpr):
    i = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, PADDED)
    bests = tl.load(best + i * CHUNKS + chunk, mask=chunk < CHUNKS, other=float("-inf"))
    _, where = tl.max(bests, axis=0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(tokens + i, tl.load(best_at + i * CHUNKS + where).to(tl.int64))


@triton.jit
def _draw_kernel(logits, rows, temperatures, thresholds, seeds, positions, best, best_at, mass, tokens, vocab,
                 logits_row, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PADDED: tl.constexpr):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, PADDED)
    inside = chunk < CHUNKS
    bests = tl.load(best + i * CHUNKS + chunk, mask=inside, other=float("-inf"))
    highest, where = tl.max(bests, axis=0, return_indices=True, return_indices_tie_break_left=True)
    row = tl.load(rows + i)
    temperature = tl.load(temperatures + row)
    if temperature == 0.0:
        tl.store(tokens + i, tl.load(best_at + i * CHUNKS + where).to(tl.int64))
        return
    masses = tl.load(mass + i * CHUNKS + chunk, mask=inside, other=0.0) * tl.exp(bests - highest)
    cumulative = tl.cumsum(masses, axis=0)
    total = tl.max(cumulative, axis=0)
    position = tl.load(positions + i)
    zero = tl.zeros([1], tl.uint32)
    word, _, _, _ = tl.philox(tl.load(seeds + row), zero + (position & 0xFFFFFFFF).to(tl.uint32),
        zero + (position >> 32).to(tl.uint32), zero, zero)  # fmt: skip
    uniform = tl.max((word >> 8).to(tl.int32), axis=0).to(tl.float32) * 5.9604644775390625e-08
    just_under = (total.to(tl.int32, bitcast=True) - 1).to(tl.float32, bitcast=True)
    target = tl.minimum(uniform * total, just_under)
    drawn = tl.minimum(tl.sum(((cumulative <= target) & inside).to(tl.int32), axis=0), CHUNKS - 1)
    before = tl.max(tl.where(chunk == drawn - 1, cumulative, 0.0), axis=0)
    at = drawn * CHUNK + tl.arange(0, CHUNK)
    x = scaled(logits + i * logits_row, at, at < vocab, temperature)
    weights = tl.exp(x - highest)
    if thresholds is not None:
        weights = tl.where(x >= tl.load(thresholds + i), weights, 0.0)
    passed = (before + tl.cumsum(weights, axis=0) > target) & (weights > 0.0)
    last = tl.max(tl.where(weights > 0.0, at, 0), axis=0)  # where rounding leaves the target just beyond
    token = tl.minimum(tl.min(tl.where(passed, at, vocab), axis=0), last)
    tl.store(tokens + i, token.to(tl.int64))


@triton.jit
def _logprob_kernel(logits, own, best, mass, above, token_ids, logprobs, ranks, vocab, logits_row, k,
                    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PADDED: tl.constexpr):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, PADDED)
    inside = chunk < CHUNKS
    row = logits + i * logits_row
    bests = tl.load(best + i * CHUNKS + chunk, mask=inside, other=float("-inf"))
    highest = tl.max(bests, axis=0)
    masses = tl.load(mass + i * CHUNKS + chunk, mask=inside, other=0.0)
    normaliser = highest + tl.log(tl.sum(masses * tl.exp(bests - highest), axis=0))
    token = tl.load(own + i)
    tl.store(ranks + i, tl.sum(tl.load(above + i * CHUNKS + chunk, mask=inside, other=0), axis=0).to(tl.int64) + 1)
    out = i * (k + 1)
    tl.store(token_ids + out, token)
    tl.store(logprobs + out, tl.load(row + token).to(tl.float32) - normaliser)
    last_value = tl.full([], float("inf"), tl.float32)
    last_at = tl.full([], -1, tl.int32)
    for j in range(k):
        value, where = tl.max(bests, axis=0, return_indices=True, return_indices_tie_break_left=True)
        at = where * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(row + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        left = (x < last_value) | ((x == last_value) & (at > last_at))
        last_at = tl.min(tl.where(left & (x == value), at, vocab - 1), axis=0)
        last_value = value
        tl.store(token_ids + out + 1 + j, last_at.to(tl.int64))
        tl.store(logprobs + out + 1 + j, value - normaliser)
        left = (x < value) | ((x == value) & (at > last_at))
        bests = tl.where(chunk == where, tl.max(tl.where(left, x, float("-inf")), axis=0), bests)


def choose(
    logits: Tensor,
    rows: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    filters: tuple[Tensor, Tensor, Tensor] | None,
) -> Tensor:
    """As `kernels.sampler.choose`; logits stay as they are."""
    n, vocab = logits.shape
    tokens = torch.empty(n, dtype=torch.int64, device=logits.device)
    if n == 0:
        return tokens
    thresholds = None if filters is None else filter_thresholds(logits, rows, temperature, *filters)
    best, best_at, mass = _chunks(logits, rows, temperature, thresholds, True)
    chunks = best.shape[1]
    _draw_kernel[(n,)](
        logits, rows, temperature, thresholds, seeds, positions, best, best_at, mass, tokens, vocab, logits.stride(0),
        CHUNK=CHUNK, CHUNKS=chunks, PADDED=triton.next_power_of_2(chunks), num_warps=4,
    )  # fmt: skip
    return tokens


def argmax(logits: Tensor) -> Tensor:
    """logits: [n, vocab] -> int64 [n], the first of the highest."""
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if len(logits):
        best, best_at, _ = _chunks(logits, None, None, None, False)
        chunks = best.shape[1]
        _best_kernel[(len(logits),)](
            best, best_at, tokens, CHUNKS=chunks, PADDED=triton.next_power_of_2(chunks), num_warps=1
        )  # fmt: skip
    return tokens


def token_logprobs(logits: Tensor, own: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """logits: [n, vocab], own: int64 [n] -> token ids int64 [n, 1 + k], log probabilities float32 [n, 1 + k], ranks."""
    n, vocab = logits.shape
    k = min(k, vocab)
    token_ids = torch.empty(n, 1 + k, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(n, 1 + k, dtype=torch.float32, device=logits.device)
    ranks = torch.empty(n, dtype=torch.int64, device=logits.device)
    if n == 0:
        return token_ids, logprobs, ranks
    chunks = triton.cdiv(vocab, CHUNK)
    above = torch.empty(n, chunks, dtype=torch.int32, device=logits.device)
    best, _, mass = _chunks(logits, None, None, None, True, own, above)
    _logprob_kernel[(n,)](
        logits, own, best, mass, above, token_ids, logprobs, ranks, vocab, logits.stride(0), k, CHUNK=CHUNK,
        CHUNKS=chunks, PADDED=triton.next_power_of_2(chunks), num_warps=4,
    )  # fmt: skip
    return token_ids, logprobs, ranks


def _chunks(
    logits: Tensor,
    rows: Tensor | None,
    temperature: Tensor | None,
    thresholds: Tensor | None,
    with_mass: bool,
    own: Tensor | None = None,
    above: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    n, vocab = logits.shape
    shape = (n, triton.cdiv(vocab, CHUNK))
    best = torch.empty(shape, dtype=torch.float32, device=logits.device)
    best_at = torch.empty(shape, dtype=torch.int32, device=logits.device)
    mass = torch.empty_like(best) if with_mass else None
    _chunk_kernel[shape](
        logits, rows, temperature, thresholds, own, best, best_at, mass, above, vocab, logits.stride(0), CHUNK=CHUNK,
        num_warps=4,
    )  # fmt: skip
    return best, best_at, mass
