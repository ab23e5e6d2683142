"""The plan of one step as flat arrays: all that crosses to a model runner, and to every shard of it."""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

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
class BlockUpdates:
    """Entries of the persistent block tables that change: table[rows[i], columns[i]] = blocks[i]."""

    rows: Ints
    columns: Ints
    blocks: Ints


@dataclass(frozen=True, slots=True)
class StepPlan:
    """S sequences with T tokens in all; K of them end this step with a sampled token.

    rows: [S] persistent row of each sequence.
    query_start: [S + 1] where each sequence's tokens begin among the T.
    seq_lens: [S] tokens of the sequence once this step's are in the cache.
    token_ids, positions: [T].
    slots: [T] block x block_size + offset; -1 where the KV is in the cache already.
    sample: [K] indices into S. A sequence samples when this step computes the last of its known tokens; the
        sampled token's position is seq_lens.
    pending: [P] indices into S: sequences whose last token of this step is the one that the step before sampled for
        their row, and is known to the device alone.
    forbidden: index into K and token id, pairs whose logits are barred (stop tokens before min_tokens).
    """

    step: int
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

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)
