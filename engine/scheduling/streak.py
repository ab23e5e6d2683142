"""Decode steps in a row in which nothing changes but the tokens.

For a few sequences the scheduler's general path is mostly the price of calling numpy on arrays of a few elements.
Between two block boundaries of a quiet batch there is nothing to decide: each step is the last one with its positions
one higher. A streak makes those plans and takes their tokens in, and writes what happened to the batch when it ends.
"""

import numpy as np
from numpy.typing import NDArray

from engine.outputs import StepOutput
from engine.scheduling.batch import PENDING, Batch
from engine.step import NO_UPDATES, Ints, StepAdapters, StepPlan

MAX_ROWS = 16
"""With more sequences than this, one of them is at a block boundary in most steps."""


class Streak:
    """Begins behind a committed step in which all of `rows` decoded. One plan is out at a time."""

    def __init__(self, batch: Batch, last: StepPlan, num_steps: int) -> None:
        self._batch = batch
        self._last = last
        self._left = num_steps
        self._start = last.seq_lens
        self._seq_lens = last.seq_lens
        self._slots = last.slots
        self._ids: Ints = batch.tokens[last.rows, last.seq_lens]
        self._adapters = None if last.adapters is None else StepAdapters(last.adapters.slots)
        self._log: list[Ints] = []
        self._request_ids: list[str] = batch.request_ids[last.rows].tolist()
        self.plan: StepPlan | None = None
        """The step that is out."""

    @staticmethod
    def length(batch: Batch, rows: Ints) -> int:
        """Steps that `rows` can go on without completing a block, needing a new one, or reaching a limit."""
        computed = batch.num_computed[rows]
        to_boundary = batch.block_size - 1 - computed % batch.block_size
        to_limit = batch.limit[rows] - 2 - computed
        return int(np.where(computed % batch.block_size, np.minimum(to_boundary, to_limit), 0).min())

    @property
    def num_computed(self) -> Ints:
        """Tokens of each row whose KV is there, or will be by the plan that is out."""
        return self._seq_lens

    def next(self) -> StepPlan | None:
        """The next plan; None when the streak is over."""
        if not self._left:
            return None
        self._left -= 1
        last, positions = self._last, self._seq_lens
        self._seq_lens = positions + 1
        self._slots = self._slots + 1
        self.plan = StepPlan(
            rows=last.rows,
            query_start=last.query_start,
            seq_lens=self._seq_lens,
            token_ids=self._ids,
            positions=positions,
            slots=self._slots,
            sample=last.sample,
            mode=last.mode,
            block_updates=NO_UPDATES,
            adapters=self._adapters,
        )
        return self.plan

    def take(self, ids: NDArray[np.integer]) -> StepOutput | None:
        """Tokens of the plan that is out; None, and nothing taken, if one of them may end its request."""
        token_ids = ids.tolist()
        if not self._batch.stop_counts.keys().isdisjoint(token_ids):
            return None
        self._ids = ids.astype(np.int32, copy=False)
        self._log.append(self._ids)
        self.plan = None
        return StepOutput(self._request_ids.copy(), token_ids)

    def write_back(self) -> None:
        """Bring the batch up to date; with a plan out, as the scheduler does when it has launched one."""
        batch, rows = self._batch, self._last.rows
        taken = len(self._log)
        if taken:
            columns = self._start[:, None] + np.arange(1, taken + 1, dtype=np.int32)
            batch.tokens[rows[:, None], columns] = np.stack(self._log, axis=1)
        batch.num_settled[rows] = self._start + taken
        batch.num_known[rows] = self._start + (taken + 1)
        batch.num_computed[rows] = self._seq_lens
        batch.num_tokens[rows] = self._seq_lens + 1
        if self.plan is not None:
            batch.tokens[rows, self._seq_lens] = PENDING
            batch.in_flight[rows] += 1


class Streaks:
    """The streak there is, if there is one, and what the next would go on from.

    last_decode: the last plan of the general path, if every running request decoded in it.
    """

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self.last_decode: StepPlan | None = None
        self.current: Streak | None = None

    def may_begin(self, order: Ints | None) -> bool:
        """order: the running rows, the very array of the last plan if nobody has come or gone."""
        last, batch = self.last_decode, self._batch
        return (
            last is not None
            and last.rows is order
            and len(last.rows) <= MAX_ROWS
            and not (batch.num_held or batch.extras.num_users)
        )

    def begin(self) -> StepPlan | None:
        """The first plan of a streak; None when it would be too short to be worth it."""
        assert self.last_decode is not None
        num_steps = Streak.length(self._batch, self.last_decode.rows)
        if num_steps < 2:
            return None
        self.current = Streak(self._batch, self.last_decode, num_steps)
        return self.current.next()

    def end(self) -> StepPlan | None:
        """Write back what happened in the streak; returns the plan that is out."""
        streak, self.current, self.last_decode = self.current, None, None
        assert streak is not None
        streak.write_back()
        return streak.plan
