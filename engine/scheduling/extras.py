"""The host's half of what only some requests ask for: biases, penalties, bad words, log probabilities.

With no such request running, a step does no work here. Tables as wide as the vocabulary are the runner's; a request
that needs one has a slot of it, the lowest that is free, so that they grow with the number of requests that use them.
"""

import heapq

import numpy as np
from numpy.typing import NDArray

from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.step import Extras, Ints, NewBias, NewPenalties, PromptScores
from engine.structured.grammar import Matcher, fill_masks

MIN_REPETITION_PENALTY = 1e-4
"""Less than this is taken as this: a logit divided by far less would overflow."""


class ExtraRows:
    """R rows, as in `Batch`, which tells this of requests that come and go.

    num_users: running requests that need anything of this.
    num_logprobs: [R] most likely tokens to name beside each output token; -1 for no log probabilities at all.
    scores_only: [R] whether the row's request makes no token.
    needs_last_token: [R] whether the row is planned only when all its tokens are known here.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_users = 0
        self.num_logprobs = np.full(num_rows, -1, dtype=np.int32)
        self.scores_only = np.zeros(num_rows, dtype=np.bool_)
        self.needs_last_token = np.zeros(num_rows, dtype=np.bool_)
        self._bias_slots = _Slots(num_rows)
        self._penalty_slots = _Slots(num_rows)
        self._new_biases: list[NewBias] = []  # since the last plan
        self._new_penalties: list[NewPenalties] = []
        self._with_bad_words: dict[int, Request] = {}
        self._with_scores: dict[int, Request] = {}
        self._with_matcher: dict[int, Matcher] = {}

    def add(self, row: int, request: Request) -> None:
        if not request.has_extras:
            return
        self.num_users += 1
        params = request.params
        if params.logprobs is not None:
            self.num_logprobs[row] = params.logprobs
        self.scores_only[row] = params.scores_only
        self.needs_last_token[row] = request.needs_last_token
        if (bias := _bias(params)) is not None:
            self._new_biases.append(NewBias(self._bias_slots.take(row), *bias))
        if params.penalised:
            self._new_penalties.append(
                NewPenalties(
                    slot=self._penalty_slots.take(row),
                    presence=params.presence_penalty,
                    frequency=params.frequency_penalty,
                    repetition=max(params.repetition_penalty, MIN_REPETITION_PENALTY),
                    prompt_ids=request.token_ids[: request.num_prompt],
                    output_ids=request.token_ids[request.num_prompt :],
                )
            )
        if request.bad_sequences:
            self._with_bad_words[row] = request
        if request.prompt_logprobs is not None:
            self._with_scores[row] = request
        if request.matcher is not None:
            self._with_matcher[row] = request.matcher

    def remove(self, row: int, request: Request) -> None:
        if not request.has_extras:
            return
        self.num_users -= 1
        self.num_logprobs[row] = -1
        self.scores_only[row] = self.needs_last_token[row] = False
        self._bias_slots.give_back(row)
        self._penalty_slots.give_back(row)
        self._with_bad_words.pop(row, None)
        self._with_scores.pop(row, None)
        self._with_matcher.pop(row, None)

    def plan(
        self, rows: Ints, start: Ints, seq_lens: Ints, query_start: Ints, sample: Ints, tokens: NDArray[np.int32]
    ) -> Extras:
        """What the S sequences in `rows` need in this step; arguments as in `StepPlan` and `Batch`."""
        sampled = rows[sample]
        logprobs = np.flatnonzero(self.num_logprobs[sampled] >= 0).astype(np.int32)
        new_biases, self._new_biases = self._new_biases, []
        new_penalties, self._new_penalties = self._new_penalties, []
        return Extras(
            new_biases=new_biases,
            new_penalties=new_penalties,
            biased=self._bias_slots.among(sampled),
            penalised=self._penalty_slots.among(sampled),
            masked=self._masks(sampled),
            logprobs=logprobs if len(logprobs) else None,
            num_top=int(self.num_logprobs[sampled[logprobs]].max(initial=0)),
            prompt_scores=self._prompt_scores(rows, start, seq_lens, query_start, tokens),
        )

    @property
    def num_matchers(self) -> int:
        """Running requests under a grammar."""
        return len(self._with_matcher)

    def follow(self, rows: Ints, ids: Ints) -> dict[int, str | None]:
        """Tell the grammars of `rows` the tokens [n] just sampled for them.

        Returns what ends by it, by index into `rows`: None where the output is complete and nothing can follow, or what
        went wrong: no token that the request's other settings allow fits its grammar, or that has grown too costly.
        """
        ends: dict[int, str | None] = {}
        for i, row in enumerate(rows.tolist()):
            matcher = self._with_matcher.get(row)
            if matcher is None:
                continue
            if matcher.error or not matcher.accept(int(ids[i])):
                ends[i] = f"structured output cannot go on: {matcher.error or 'no allowed token fits'}"
            elif matcher.is_terminated:
                ends[i] = None
        return ends

    def _masks(self, rows: Ints) -> tuple[Ints, NDArray[np.int32]] | None:
        if not self._with_matcher:
            return None
        at = [i for i, row in enumerate(rows.tolist()) if row in self._with_matcher]
        if not at:
            return None
        matchers = [self._with_matcher[int(rows[i])] for i in at]
        masks = np.empty((len(at), matchers[0].width), dtype=np.int32)
        fill_masks(matchers, masks)  # one in an error allows EOS alone, and `follow` ends it
        return np.array(at, dtype=np.int32), masks

    def barred(self, rows: Ints, tokens: NDArray[np.int32], num_tokens: Ints) -> list[tuple[int, int]]:
        """Index into `rows` and token id of what would complete a bad word of several tokens."""
        if not self._with_bad_words:
            return []
        pairs = []
        for i, row in enumerate(rows.tolist()):
            if (request := self._with_bad_words.get(row)) is not None:
                output_ids = tokens[row, request.num_prompt : num_tokens[row]]
                pairs += [(i, token_id) for token_id in request.bad_sequences.barred(output_ids)]
        return pairs

    def _prompt_scores(
        self, rows: Ints, start: Ints, seq_lens: Ints, query_start: Ints, tokens: NDArray[np.int32]
    ) -> PromptScores | None:
        if not self._with_scores:
            return None
        sequences, counts, at, targets, num_top = [], [], [], [], 0
        for i, row in enumerate(rows.tolist()):
            request = self._with_scores.get(row)
            if request is None or start[i] >= request.num_prompt:
                continue
            count = int(min(seq_lens[i], request.num_prompt - 1) - start[i])  # the last one's successor is an output
            sequences.append(i)
            counts.append(count)
            at.append(np.arange(query_start[i], query_start[i] + count, dtype=np.int32))
            targets.append(tokens[row, start[i] + 1 : start[i] + 1 + count].copy())
            num_top = max(num_top, request.params.prompt_logprobs or 0)
        if not sequences:
            return None
        return PromptScores(
            at=np.concatenate(at),
            targets=np.concatenate(targets),
            num_top=num_top,
            sequences=np.array(sequences, dtype=np.int32),
            counts=np.array(counts, dtype=np.int32),
        )


class _Slots:
    """Slots of one of the runner's tables, by the row that holds each; -1 for none."""

    def __init__(self, num_rows: int) -> None:
        self._of_row = np.full(num_rows, -1, dtype=np.int32)
        self._free: list[int] = []
        self._num_made = 0

    def take(self, row: int) -> int:
        if self._free:
            slot = heapq.heappop(self._free)
        else:
            slot = self._num_made
            self._num_made += 1
        self._of_row[row] = slot
        return slot

    def give_back(self, row: int) -> None:
        if self._of_row[row] >= 0:
            heapq.heappush(self._free, int(self._of_row[row]))
            self._of_row[row] = -1

    def among(self, rows: Ints) -> tuple[Ints, Ints] | None:
        """Indices into `rows` of those that hold a slot, and their slots."""
        slots = self._of_row[rows]
        at = np.flatnonzero(slots >= 0).astype(np.int32)
        return (at, slots[at]) if len(at) else None


def _bias(params: SamplingParams) -> tuple[Ints, NDArray[np.float32], float] | None:
    """Token ids, what is added to their logits, and what to all others; None if that is nothing."""
    allowed = params.allowed_token_ids
    values = dict.fromkeys(allowed or (), 0.0)
    for token_id, bias in (params.logit_bias or {}).items():
        if allowed is None or token_id in values:
            values[token_id] = bias
    values.update({ids[0]: -np.inf for ids in params.bad_words_token_ids if len(ids) == 1})
    if not values:
        return None
    return (
        np.fromiter(values, dtype=np.int32, count=len(values)),
        np.fromiter(values.values(), dtype=np.float32, count=len(values)),
        0.0 if allowed is None else -np.inf,
    )
