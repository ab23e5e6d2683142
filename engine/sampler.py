"""Chooses tokens from logits, by what the rows of a step need, and tells log probabilities."""

from collections.abc import Callable

import torch
from torch import Tensor

from engine.device.step_inputs import DeviceRows, PromptScoreInputs, SampleInputs
from engine.step import SamplingMode
from kernels import sampler
from kernels.bitmask import apply_bitmask
from kernels.sampler import TokenLogprobs

PROMPT_ROWS = 256
"""Prompt tokens scored at once, at most: their logits are as wide as the vocabulary."""


def sample(
    logits: Tensor, inputs: SampleInputs, rows: DeviceRows, mode: SamplingMode
) -> tuple[Tensor, TokenLogprobs | None]:
    """logits: float32 [K, vocab], changed in place -> token ids int64 [K], and log probabilities where asked for.

    The order is vLLM's: log probabilities are those of the model itself; then come biases and barred tokens, then
    penalties, then temperature, then filters.
    """
    extras, tables = inputs.extras, rows.tables
    raw = None
    if extras is not None:
        if extras.logprobs is not None:
            raw = logits[extras.logprobs]
        if extras.biased is not None:
            tables.add_bias(logits, *extras.biased)
        if extras.masked is not None:
            at, masks = extras.masked
            apply_bitmask(logits, masks, None if len(at) == len(logits) else at)
    if inputs.forbidden is not None:
        logits.index_put_(inputs.forbidden, logits.new_full((), -torch.inf))  # a plain number would come from the host
    if extras is not None and extras.penalised is not None:
        tables.penalise(logits, *extras.penalised)
    tokens = choose(logits, inputs.rows, inputs.positions, rows, mode)
    if extras is None:
        return tokens, None
    if extras.penalised is not None:
        at, slots = extras.penalised
        tables.count(tokens[at], slots)
    if raw is None:
        return tokens, None
    return tokens, sampler.logprobs_of(raw, tokens[extras.logprobs], extras.num_top)


def choose(
    logits: Tensor, at: Tensor, positions: Tensor, rows: DeviceRows, mode: SamplingMode, *, unseen: bool = False
) -> Tensor:
    """logits: float32 [K, vocab], changed in place; at: their rows, and positions of the tokens to come, int64 [K]
    -> token ids int64 [K].

    unseen: nothing may depend on a look at the values, as in a captured graph; so torch's filters sort whole rows.
    """
    if mode is SamplingMode.GREEDY:
        return sampler.argmax(logits)
    filters = (rows.top_k, rows.top_p, rows.min_p) if mode is SamplingMode.FULL else None
    candidates = logits.shape[-1] if unseen else sampler.CANDIDATES
    return sampler.choose(logits, at, rows.temperature, rows.seed, positions, filters, candidates)


def score_prompt(
    logits_of: Callable[[Tensor], Tensor], hidden: Tensor, inputs: PromptScoreInputs, num_rows: int = PROMPT_ROWS
) -> TokenLogprobs:
    """Log probabilities of a step's prompt tokens.

    logits_of: hidden states [n, hidden] -> float32 [n, vocab], called with at most num_rows of them.
    hidden: [T, hidden].
    """
    parts = [
        sampler.logprobs_of(logits_of(hidden.index_select(0, at)), targets, inputs.num_top)
        for at, targets in zip(inputs.at.split(num_rows), inputs.targets.split(num_rows), strict=True)
    ]
    return TokenLogprobs(
        torch.cat([part.token_ids for part in parts]),
        torch.cat([part.logprobs for part in parts]),
        torch.cat([part.ranks for part in parts]),
    )
