"""Sampling: one uniform number a token, and the inverse of the filtered distribution's cumulative sum.

A token is a function of (logits, parameters, seed, position) on every device: the uniform number comes from
Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) with the seed as its key and the
token's position as its counter, and the token is the first in vocabulary order whose cumulative probability exceeds
it. Filters follow vLLM's order: temperature, min_p, top_k, top_p; tokens equal to the last one kept are kept too.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import gpu
from kernels.argmax import argmax as host_argmax

CANDIDATES = 256
"""Most likely tokens looked at first; a filter that reaches beyond them has its row sorted whole."""

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """seeds, positions: int64 [n] -> float32 [n] in [0, 1), 24 bits each."""
    return (philox(seeds, positions)[0] >> 8).to(torch.float32) * 2.0**-24


def philox(keys: Tensor, counters: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10. keys, counters: int64 [n] -> four words of 32 bits, each int64 [n]."""
    k0, k1 = keys & _MASK, keys >> 32 & _MASK
    c0, c1 = counters & _MASK, counters >> 32 & _MASK
    c2 = c3 = torch.zeros_like(c0)
    for _ in range(10):
        # int64 products wrap, which leaves all 64 bits right.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> 32 & _MASK) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32 & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = k0 + _KEY_STEPS[0] & _MASK, k1 + _KEY_STEPS[1] & _MASK
    return c0, c1, c2, c3


def draw(logits: Tensor, uniforms: Tensor) -> Tensor:
    """logits: float32 [n, vocab], -inf where barred; uniforms: [n] -> token ids int64 [n].

    A row without a distribution (all of it barred, or a NaN in it) gives some id of the vocabulary all the same: one
    beyond it would break the next step for every row.
    """
    cumulative = torch.softmax(logits, dim=-1).cumsum(dim=-1)
    total = cumulative[:, -1:]
    target = torch.minimum(uniforms[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1).clamp_(max=logits.shape[-1] - 1)


def lowest_kept(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, candidates: int = CANDIDATES) -> Tensor:
    """The lowest logit that the filters keep in each row; the most likely token is always kept.

    logits: float32 [n, vocab], divided by the temperature; top_k: int [n], 0 keeps all; top_p in (0, 1] and min_p in
    [0, 1]: float32 [n] -> float32 [n, 1].
    """
    vocab = logits.shape[-1]
    size = min(candidates, vocab)
    top = logits.topk(size, dim=-1).values  # [n, size], falling
    best = top[:, :1]
    k = torch.where(top_k > 0, top_k, vocab).clamp(max=vocab).to(torch.int64)[:, None]
    kth = top.gather(1, k.clamp(max=size) - 1)
    low = torch.maximum(best + min_p[:, None].log(), torch.where(k < vocab, kth, -torch.inf))
    weights = torch.where(top >= low, (top - best).exp(), 0.0)
    mass = torch.where(logits >= low, (logits - best).exp(), 0.0).sum(dim=-1, keepdim=True)
    inside = weights.cumsum(dim=-1) - weights < top_p[:, None] * mass  # the nucleus: tokens before top_p is reached
    nucleus = torch.where(inside, top, torch.inf).amin(dim=-1, keepdim=True)
    low = torch.where(top_p[:, None] < 1.0, torch.maximum(low, nucleus), low)
    low = torch.minimum(low, best)  # a top_p that is 0 in float32 has no nucleus
    if size < vocab:
        beyond = ((k > size) & (k < vocab)).squeeze(-1) | (
            (top_p < 1.0) & inside[:, -1] & (top[:, -1:] >= low).squeeze(-1)
        )
        if beyond.any():
            low[beyond] = lowest_kept(logits[beyond], top_k[beyond], top_p[beyond], min_p[beyond], vocab)
    return low


def choose(
    logits: Tensor,
    rows: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    filters: tuple[Tensor, Tensor, Tensor] | None = None,
    candidates: int = CANDIDATES,
) -> Tensor:
    """Tokens by each row's parameters: int64 [n].

    logits: float32 [n, vocab], may be changed; rows: int64 [n], where each one's parameters are in temperature: float32
    [R], 0 for the most likely token, and seeds: int64 [R]; positions: int64 [n], of the token to come.
    filters: top_k: int32 [R], top_p and min_p: float32 [R], as in `lowest_kept`; None if no row filters.
    candidates: of `lowest_kept`, off a GPU.
    """
    if gpu.usable(logits):
        from kernels.gpu import sampler

        return sampler.choose(logits, rows, temperature, seeds, positions, filters)
    best = argmax(logits)
    own = temperature[rows]
    greedy = own == 0
    logits.div_(torch.where(greedy, 1.0, own)[:, None])
    if filters is not None:
        top_k, top_p, min_p = filters
        low = lowest_kept(logits, top_k[rows], top_p[rows], min_p[rows], candidates)
        logits.masked_fill_(logits < low, -torch.inf)
    return torch.where(greedy, best, draw(logits, uniform(seeds[rows], positions)))


def argmax(logits: Tensor) -> Tensor:
    """logits: [n, vocab] -> int64 [n], the first of the highest."""
    if gpu.usable(logits):
        from kernels.gpu import sampler

        return sampler.argmax(logits)
    return host_argmax(logits)


def penalise(logits: Tensor, seen: Tensor, presence: Tensor, frequency: Tensor, repetition: Tensor) -> Tensor:
    """Logits of tokens that were there before, made less likely; OpenAI's and CTRL's definitions in vLLM's order.

    logits: float32 [n, vocab]; seen: int32 [n, vocab], twice the times that the output has a token, plus one if the
    prompt has it; presence, frequency, repetition: float32 [n, 1] -> float32 [n, vocab].
    """
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(seen > 0, repeated, logits)
    count = seen >> 1
    return logits - frequency * count - presence * (count > 0)


def penalise_rows(logits: Tensor, at: Tensor, seen: Tensor, slots: Tensor, penalties: Tensor) -> None:
    """`penalise` on some rows of logits: float32 [n, vocab], in place.

    at: int64 [m], which rows; slots: int64 [m], their rows in seen: int32 [slots, vocab] and in penalties: float32
    [slots, 3], which holds presence, frequency, repetition.
    """
    if gpu.usable(logits):
        from kernels.gpu import logits as gpu_logits

        gpu_logits.penalise_rows(logits, at, seen, slots, penalties)
        return
    presence, frequency, repetition = penalties[slots].split(1, dim=1)
    logits[at] = penalise(logits[at], seen[slots], presence, frequency, repetition)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log probabilities of n tokens, each with the k most likely in its place.

    token_ids: int64 [n, 1 + k], the token itself first; logprobs: float32 [n, 1 + k]; ranks: int64 [n], from 1.
    """

    token_ids: Tensor
    logprobs: Tensor
    ranks: Tensor


def logprobs_of(logits: Tensor, tokens: Tensor, k: int) -> TokenLogprobs:
    """`token_logprobs` of the log softmax of logits: float32 [n, vocab]."""
    if gpu.usable(logits):
        from kernels.gpu import sampler

        return TokenLogprobs(*sampler.token_logprobs(logits, tokens, k))
    return token_logprobs(torch.log_softmax(logits, dim=-1), tokens, k)


def token_logprobs(logprobs: Tensor, tokens: Tensor, k: int) -> TokenLogprobs:
    """logprobs: float32 [n, vocab]; tokens: int64 [n]; at most as many of the most likely as the vocabulary has."""
    own = logprobs.gather(1, tokens[:, None])
    ranks = (logprobs > own).sum(dim=-1) + 1
    top = logprobs.topk(min(k, logprobs.shape[-1]), dim=-1)
    return TokenLogprobs(torch.cat((tokens[:, None], top.indices), 1), torch.cat((own, top.values), 1), ranks)
