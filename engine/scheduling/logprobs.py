"""Log probabilities of a step, from the runner's arrays to the requests that asked for them."""

from engine.outputs import StepOutput, TokenLogprobs
from engine.scheduling.batch import Batch
from engine.step import Logprobs, PromptScores, StepPlan, StepResult


def hand_out(plan: StepPlan, result: StepResult, batch: Batch, output: StepOutput) -> None:
    """Put a step's log probabilities into `output`; those of a prompt when all of its tokens have theirs."""
    extras = plan.extras
    if extras is None:
        return
    if extras.logprobs is not None:
        assert result.logprobs is not None
        rows = plan.rows[plan.sample[extras.logprobs]]
        entries = _entries(result.logprobs)
        for row, entry in zip(rows.tolist(), entries, strict=True):
            request = batch.requests[row]
            if request is not None and batch.alive[row]:
                output.logprobs.setdefault(request.request_id, []).append(_first(entry, request.params.logprobs))
    if extras.prompt_scores is not None:
        _hand_out_prompts(plan, extras.prompt_scores, result, batch, output)


def _hand_out_prompts(
    plan: StepPlan, scores: PromptScores, result: StepResult, batch: Batch, output: StepOutput
) -> None:
    entries = [] if result.prompt_logprobs is None else _entries(result.prompt_logprobs)
    end = 0
    for i, count in zip(scores.sequences.tolist(), scores.counts.tolist(), strict=True):
        start, end = end, end + count
        row = plan.rows[i]
        request = batch.requests[row]
        if request is None or not batch.alive[row] or request.prompt_logprobs is None:
            continue
        num_top = request.params.prompt_logprobs
        request.prompt_logprobs += [_first(entry, num_top) for entry in entries[start:end]]
        if plan.seq_lens[i] >= request.num_prompt:
            output.prompt_logprobs[request.request_id] = request.prompt_logprobs
            request.prompt_logprobs = None


def _entries(logprobs: Logprobs) -> list[TokenLogprobs]:
    lists = zip(logprobs.token_ids.tolist(), logprobs.logprobs.tolist(), logprobs.ranks.tolist(), strict=True)
    return [TokenLogprobs(*entry) for entry in lists]


def _first(entry: TokenLogprobs, num_top: int | None) -> TokenLogprobs:
    """The token itself and the `num_top` most likely; another request of the step may have asked for more."""
    end = 1 + (num_top or 0)
    if end == len(entry.token_ids):
        return entry
    return TokenLogprobs(entry.token_ids[:end], entry.logprobs[:end], entry.rank)
