"""The plan of one step as flat arrays: all that crosses to a model runner, and to every shard of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from engine.lora.adapter import Adapter

Ints = NDArray[np.int32]


class SamplingMode(IntEnum):
    """What the rows of a step need; a batch that needs less pays for less."""

    GREEDY = 0
    """All rows take the most likely token."""
    PLAIN = 1
    """Some rows draw from the whole distribution."""
    FULL = 2
    """Some rows filter the distribution (top_k, top_p, min_p)."""


@dataclass(frozen=True, slots=True)
class RowParams:
    """Sampling parameters of the rows that are new in this step; the runner keeps them until the row is reused."""

    rows: Ints
    temperature: NDArray[np.float32]
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    top_k: Ints
    seed: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class NewBias:
    """What is to be added to the logits of a request that is new in this step; -inf bars a token.

    slot: where the runner keeps it until another takes the slot. others: for all tokens that are not in token_ids.
    """

    slot: int
    token_ids: Ints
    values: NDArray[np.float32]
    others: float


@dataclass(frozen=True, slots=True)
class NewPenalties:
    """The penalties of a request that is new in this step, with the tokens it has so far, to be counted in `slot`."""

    slot: int
    presence: float
    frequency: float
    repetition: float
    prompt_ids: Ints
    output_ids: Ints


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Prompt tokens whose log probabilities are asked for: M of them, by the tokens before them.

    at: [M] indices into T, of the tokens before. targets: [M] token ids. num_top: most likely tokens to name beside.
    sequences: indices into S of those they belong to, in order; counts: how many to each (0 in a prompt's last chunk,
        if that is its last token alone).
    """

    at: Ints
    targets: Ints
    num_top: int
    sequences: Ints
    counts: Ints


@dataclass(frozen=True, slots=True)
class Extras:
    """What some of a step's K samples need beyond `RowParams`; a plan has it only if one of them needs something.

    biased, penalised: indices into K, and the slots there; None where there are none.
    masked: indices into K, and int32 [n, ceil(vocab / 32)], bit i % 32 of word i // 32 set where token i is allowed.
    logprobs: indices into K of the tokens whose log probabilities are asked for; num_top: most likely ones beside.
    """

    new_biases: Sequence[NewBias] = ()
    new_penalties: Sequence[NewPenalties] = ()
    biased: tuple[Ints, Ints] | None = None
    penalised: tuple[Ints, Ints] | None = None
    masked: tuple[Ints, NDArray[np.int32]] | None = None
    logprobs: Ints | None = None
    num_top: int = 0
    prompt_scores: PromptScores | None = None


@dataclass(frozen=True, slots=True)
class BlockUpdates:
    """Entries of the persistent block tables that change: table[rows[i], columns[i]] = blocks[i]."""

    rows: Ints
    columns: Ints
    blocks: Ints


NO_UPDATES = BlockUpdates(*(np.empty(0, dtype=np.int32) for _ in range(3)))


@dataclass(frozen=True, slots=True)
class BlockCopies:
    """KV blocks to copy before the step: out_blocks[i] to the host's out_host[i], then in_host[i] to in_blocks[i]."""

    out_blocks: Ints
    out_host: Ints
    in_blocks: Ints
    in_host: Ints


@dataclass(frozen=True, slots=True)
class StepAdapters:
    """slots: [S] where the adapter of each sequence is, -1 without one. loads: what slots are to be given before."""

    slots: Ints
    loads: "Sequence[tuple[int, Adapter]]" = ()


@dataclass(slots=True)
class StepPlan:
    """S sequences with T tokens in all; K of them end this step with a sampled token. Nobody changes it.

    rows: [S] persistent row of each sequence.
    query_start: [S + 1] where each sequence's tokens begin among the T.
    seq_lens: [S] tokens of the sequence once this step's are in the cache.
    token_ids, positions: [T].
    slots: [T] block x block_size + offset; -1 where the KV is in the cache already.
    sample: [K] indices into S. A sequence samples when this step computes the last of its known tokens; the
        sampled token's position is seq_lens.
    pending: [P] indices into S: sequences whose last token of this step is the one that the step before sampled for
        their row, and is known to the device alone.
    forbidden: index into K and token id, pairs whose logits are barred (stop tokens before min_tokens, ends of bad
        words).
    copies: None in a step before which nobody was preempted to the host or comes back from there.
    adapters: None where no running request has one.
    """

    rows: Ints
    query_start: Ints
    seq_lens: Ints
    token_ids: Ints
    positions: Ints
    slots: NDArray[np.int64]
    sample: Ints
    mode: SamplingMode
    block_updates: BlockUpdates
    new_rows: RowParams | None = None
    pending: Ints | None = None
    forbidden: tuple[Ints, Ints] | None = None
    extras: Extras | None = None
    copies: BlockCopies | None = None
    adapters: StepAdapters | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural log probabilities of n tokens and of the most likely ones in their places.

    token_ids: [n, 1 + num_top], the token itself first. logprobs: float32 [n, 1 + num_top].
    ranks: [n], of the token itself; 1 is the most likely.
    """

    token_ids: NDArray[np.integer]
    logprobs: NDArray[np.float32]
    ranks: NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step brought. token_ids: [K], in the order of `plan.sample`.

    logprobs: of the tokens in `plan.extras.logprobs`; prompt_logprobs: of those in `plan.extras.prompt_scores`.
    """

    token_ids: NDArray[np.integer]
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
