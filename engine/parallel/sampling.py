"""Sampling among ranks: rank 0 has the logits of all, chooses, and tells the others."""

from dataclasses import replace

import torch
from torch import Tensor

from engine.device.step_inputs import DeviceRows, PromptScoreInputs, SampleInputs
from engine.models.decoder import Decoder
from engine.parallel.group import ParallelGroup
from engine.sampler import sample, score_prompt
from engine.step import Extras, SamplingMode, StepPlan
from kernels.sampler import TokenLogprobs


def follower_plan(plan: StepPlan) -> StepPlan:
    """What of a plan ranks behind the first need: not what tokens are chosen by."""
    if plan.extras is None and plan.forbidden is None:
        return plan
    scores = None if plan.extras is None else plan.extras.prompt_scores
    return replace(plan, forbidden=None, extras=None if scores is None else Extras(prompt_scores=scores))


def sample_together(
    group: ParallelGroup, logits: Tensor, inputs: SampleInputs, rows: DeviceRows, mode: SamplingMode
) -> tuple[Tensor, TokenLogprobs | None]:
    """As `engine.sampler.sample` on rank 0; the others have no logits, and get its tokens but no log probabilities."""
    if group.rank == 0:
        tokens, logprobs = sample(logits, inputs, rows, mode)
    else:
        tokens, logprobs = torch.empty_like(inputs.rows), None
    return group.broadcast(tokens), logprobs


def score_together(model: Decoder, hidden: Tensor, inputs: PromptScoreInputs, num_rows: int) -> TokenLogprobs | None:
    """As `engine.sampler.score_prompt` on rank 0, to which the others give their part of the logits."""
    assert model.group is not None
    if model.group.rank == 0:
        return score_prompt(model.logits, hidden, inputs, num_rows)
    for at in inputs.at.split(num_rows):
        model.logits(hidden.index_select(0, at))
    return None
