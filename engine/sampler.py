"""Chooses tokens from logits, by what the rows of a step need."""

import torch
from torch import Tensor

from engine.step import SamplingMode
from engine.step_inputs import DeviceRows, StepInputs
from kernels.sampler import draw, lowest_kept, uniform


def sample(logits: Tensor, inputs: StepInputs, rows: DeviceRows, mode: SamplingMode) -> Tensor:
    """logits: float32 [K, vocab], changed in place -> token ids int64 [K]."""
    if inputs.forbidden is not None:
        logits[inputs.forbidden] = -torch.inf
    best = logits.argmax(dim=-1)
    if mode is SamplingMode.GREEDY:
        return best
    at = inputs.sample_rows
    temperature = rows.temperature[at]
    greedy = temperature == 0
    logits.div_(torch.where(greedy, 1.0, temperature)[:, None])
    if mode is SamplingMode.FULL:
        low = lowest_kept(logits, rows.top_k[at], rows.top_p[at], rows.min_p[at])
        logits.masked_fill_(logits < low, -torch.inf)
    tokens = draw(logits, uniform(rows.seed[at], inputs.sample_positions))
    return torch.where(greedy, best, tokens)
