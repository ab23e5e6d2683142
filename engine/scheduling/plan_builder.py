"""Turns what the scheduler decided into a step's plan: flat arrays, and the differences to what the device has."""

import numpy as np

from engine.lora.slots import AdapterSlots
from engine.scheduling.batch import PENDING, Batch
from engine.step import NO_UPDATES, BlockCopies, BlockUpdates, Ints, RowParams, SamplingMode, StepAdapters, StepPlan


class PlanBuilder:
    """Collects the changes of rows and blocks since the last plan, and makes the next one.

    repeats: whether the last plan was one more decode of all the rows that the plan before it decoded.
    """

    def __init__(self, batch: Batch, adapters: AdapterSlots) -> None:
        self._batch = batch
        self._adapters = adapters
        self._arange = np.arange(len(batch.num_tokens) + 1, dtype=np.int32)
        self.repeats = False
        # What a step of decodes has in common with the next one of the same rows: the very same arrays.
        self._decodes: tuple[Ints, Ints, Ints] | None = None  # rows, query_start, sample
        self._updates: tuple[list[int], list[int], list[int]] = ([], [], [])  # rows, columns, blocks
        self._new_rows: list[int] = []
        self._copies_out: list[tuple[list[int], list[int]]] = []
        self._copies_in: list[tuple[list[int], list[int]]] = []

    def add_row(self, row: int) -> None:
        """A request has got the row."""
        self._new_rows.append(row)

    def add_block(self, row: int, column: int, block: int) -> None:
        """The row's request has got a block, its next; the batch's table has it from the next plan on."""
        rows, columns, blocks = self._updates
        rows.append(row)
        columns.append(column)
        blocks.append(block)

    def remove_row(self, row: int) -> None:
        """The row's request is gone, and another may get the row in this very step."""
        rows = self._updates[0]
        if row in rows:
            keep = [i for i, other in enumerate(rows) if other != row]
            rows, columns, blocks = ([values[i] for i in keep] for values in self._updates)
            self._updates = (rows, columns, blocks)

    def copy_out(self, blocks: list[int], host_blocks: list[int]) -> None:
        """The next plan copies `blocks` to the host, before anything can write to them."""
        self._copies_out.append((blocks, host_blocks))

    def copy_in(self, blocks: list[int], host_blocks: list[int]) -> None:
        """The next plan copies `host_blocks` back, before anything can read them."""
        self._copies_in.append((blocks, host_blocks))

    def plan(self, rows: Ints, counts: Ints, in_flight: bool) -> StepPlan:
        """`counts[i]` tokens for each row. in_flight: whether tokens of the rows may be PENDING.

        Where the very array `rows` decoded in the last plan too, this one has that one's query_start and sample.
        """
        batch, size = self._batch, self._batch.block_size
        start = batch.num_computed[rows]
        seq_lens = start + counts
        last_positions = batch.num_tokens[rows] - 1
        known = self._decodes
        if counts.sum() == len(rows):  # one token each
            query_start = self._arange[: len(rows) + 1] if known is None or known[0] is not rows else known[1]
            token_rows, positions = rows, start
        else:
            query_start = np.zeros(len(rows) + 1, dtype=np.int32)
            np.cumsum(counts, out=query_start[1:])
            token_rows = np.repeat(rows, counts)
            offsets = np.arange(query_start[-1], dtype=np.int32) - np.repeat(query_start[:-1], counts)
            positions = np.repeat(start, counts) + offsets
        updates = self._block_updates()
        slots = batch.block_table[token_rows, positions // size].astype(np.int64)
        slots *= size
        slots += positions % size
        if self._new_rows:  # only a request that is new here can begin among tokens that it took from the cache
            slots[positions < batch.num_reused[token_rows]] = -1
        token_ids = batch.tokens[token_rows, positions]
        pending = None
        if in_flight:
            pending = np.flatnonzero(token_ids[query_start[1:] - 1] == PENDING).astype(np.int32)
        complete = seq_lens > last_positions
        if batch.extras.num_users:
            complete &= ~batch.extras.scores_only[rows]
        self.repeats = known is not None and known[1] is query_start and bool(complete.all())
        if known is not None and self.repeats:
            sample = known[2]
        else:
            sample = np.flatnonzero(complete).astype(np.int32)
            self._decodes = (rows, query_start, sample) if token_rows is rows and len(sample) == len(rows) else None
        return StepPlan(
            rows=rows,
            query_start=query_start,
            seq_lens=seq_lens,
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            sample=sample,
            mode=self._mode(),
            block_updates=updates,
            new_rows=self._row_params(),
            pending=pending if pending is not None and len(pending) else None,
            forbidden=self._forbidden(rows[sample]),
            extras=batch.extras.plan(rows, start, seq_lens, query_start, sample, batch.tokens)
            if batch.extras.num_users
            else None,
            copies=self._block_copies() if self._copies_out or self._copies_in else None,
            adapters=StepAdapters(batch.adapter_slots[rows], self._adapters.loads()) if batch.num_adapted else None,
        )

    def _block_copies(self) -> BlockCopies:
        parts = [
            np.array([block for pair in copies for block in pair[side]], dtype=np.int32)
            for copies in (self._copies_out, self._copies_in)
            for side in (0, 1)
        ]
        self._copies_out, self._copies_in = [], []
        return BlockCopies(*parts)

    def _row_params(self) -> RowParams | None:
        if not self._new_rows:
            return None
        rows = np.array(self._new_rows, dtype=np.int32)
        self._new_rows = []
        batch = self._batch
        return RowParams(
            rows,
            batch.temperature[rows],
            batch.top_p[rows],
            batch.min_p[rows],
            batch.top_k[rows],
            batch.seed[rows],
        )

    def _block_updates(self) -> BlockUpdates:
        if not self._updates[0]:
            return NO_UPDATES
        rows, columns, blocks = (np.array(values, dtype=np.int32) for values in self._updates)
        self._updates = ([], [], [])
        self._batch.block_table[rows, columns] = blocks
        self._batch.num_blocks[rows] = columns + 1  # columns of a row rise, and the last one counts
        return BlockUpdates(rows, columns, blocks)

    def _mode(self) -> SamplingMode:
        batch = self._batch
        if batch.num_filtered:
            return SamplingMode.FULL
        return SamplingMode.PLAIN if batch.num_random else SamplingMode.GREEDY

    def _forbidden(self, rows: Ints) -> tuple[Ints, Ints] | None:
        """Stop tokens are barred where the next token comes before min_tokens, and a bad word's last token."""
        batch = self._batch
        if not batch.num_held and not batch.extras.num_users:
            return None
        early = np.flatnonzero(batch.stop_from[rows] > batch.num_tokens[rows] + 1)
        stop_ids = batch.stop_ids[rows[early]]
        at, column = np.nonzero(stop_ids >= 0)
        places, ids = early[at].astype(np.int32), stop_ids[at, column]
        if bad := batch.extras.barred(rows, batch.tokens, batch.num_tokens):
            more = np.array(bad, dtype=np.int32)
            places, ids = np.concatenate((places, more[:, 0])), np.concatenate((ids, more[:, 1]))
        return (places, ids) if len(ids) else None
