"""A decode step on static buffers: the same memory and the same shapes each time, so that a GPU can replay it.

Every sequence computes one token and samples. Their number is padded to one of a few sizes. A padding sequence has no
query, writes no KV (its slot is -1), and reads and writes the one row of the device's tables that is kept for it, so it
changes nothing. What the host knows of a step travels in one copy; the ids that it does not know (PENDING) are taken
from what the step before sampled, which is on the device.

Nothing here knows of graphs: `graph_runner` captures `forward` and `sample`, and on a CPU they run as they are.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.device.pinned import Ring, pinned_empty
from engine.device.step_inputs import DeviceRows, SampleInputs
from engine.layers.attention import KVCache
from engine.models.decoder import Decoder
from engine.runner import RunnerInfo
from engine.sampler import choose
from engine.scheduling.batch import PENDING
from engine.step import SamplingMode, StepPlan
from kernels.attention import AttentionMetadata


def padded_sizes(max_num_seqs: int) -> list[int]:
    """The sizes that numbers of sequences from 1 to max_num_seqs are padded to, rising; max_num_seqs is the last.

    1, 2, 4, then 8 apart, and from 512 on at most a 32nd of themselves apart.
    """
    sizes = [size for size in (1, 2, 4) if size < max_num_seqs]
    size = 8
    while size < max_num_seqs:
        sizes.append(size)
        size += max(8, (1 << size.bit_length() - 1) // 32)
    return [*sizes, max_num_seqs]


def is_decode(plan: StepPlan) -> bool:
    """Whether every sequence of the step computes one token and samples."""
    return plan.num_tokens == len(plan.rows) == len(plan.sample)


class StepArrays:
    """A padded step's inputs in one piece of memory, for B sequences at most.

    token_ids, positions, slots, rows: int64 [B]; rows_32, seq_lens: int32 [B]; query_start: int32 [B + 1].
    update_rows, update_columns: int64 [B], update_blocks: int32 [B]: changes of block tables; none: the padding row's.
    """

    PARTS: tuple[tuple[str, type[np.generic], int], ...] = (
        ("token_ids", np.int64, 0),
        ("positions", np.int64, 0),
        ("slots", np.int64, 0),
        ("rows", np.int64, 0),
        ("update_rows", np.int64, 0),
        ("update_columns", np.int64, 0),
        ("update_blocks", np.int32, 0),
        ("rows_32", np.int32, 0),
        ("seq_lens", np.int32, 0),
        ("query_start", np.int32, 1),
    )
    """Name, type, and elements beyond B."""

    def __init__(self, size: int, memory: Tensor) -> None:
        self.memory = memory
        start = 0
        for name, kind, more in self.PARTS:
            end = start + (size + more) * np.dtype(kind).itemsize
            setattr(self, name, memory[start:end].view(torch.int64 if kind is np.int64 else torch.int32))
            start = end

    @classmethod
    def num_bytes(cls, size: int) -> int:
        return sum((size + more) * np.dtype(kind).itemsize for _, kind, more in cls.PARTS)

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    rows: Tensor
    update_rows: Tensor
    update_columns: Tensor
    update_blocks: Tensor
    rows_32: Tensor
    seq_lens: Tensor
    query_start: Tensor


class _HostArrays:
    """`StepArrays` in pinned memory, with numpy's view of each."""

    def __init__(self, size: int) -> None:
        arrays = StepArrays(size, pinned_empty(StepArrays.num_bytes(size)))
        self.memory = arrays.memory
        self.views: dict[str, NDArray[Any]] = {name: getattr(arrays, name).numpy() for name, _, _ in arrays.PARTS}


class PaddedStep:
    """hidden: [B, hidden], what `forward` made; tokens: int64 [B], what `sample` chose. Both are overwritten each step.

    sizes: as `padded_sizes` makes them; B is the last.
    """

    def __init__(
        self,
        model: Decoder,
        caches: Sequence[KVCache],
        rows: DeviceRows,
        info: RunnerInfo,
        *,
        dtype: torch.dtype,
        device: torch.device,
        cuda: Any = torch.cuda,
    ) -> None:
        self.model = model
        self.caches = caches
        self.rows = rows
        self.sizes = padded_sizes(info.max_num_seqs)
        self._size_of = np.repeat(self.sizes, np.diff([0, *self.sizes])).tolist()  # of n sequences, at n - 1
        most = self.sizes[-1]
        self._inputs = StepArrays(most, torch.zeros(StepArrays.num_bytes(most), dtype=torch.uint8, device=device))
        self.hidden = torch.zeros(most, model.config.hidden_size, dtype=dtype, device=device)
        self.tokens = torch.zeros(most, dtype=torch.int64, device=device)
        # As wide as the tables: what is captured must serve the longest sequence there can be.
        self._max_seq_len = info.max_model_len
        self._ring = Ring(lambda: _HostArrays(most), cuda)
        self._counting = np.arange(most + 1, dtype=np.int32)

    def fill(self, plan: StepPlan | None, size: int = 0) -> int:
        """Bring a decode step's inputs to the device; returns the size to run it at. No plan: `size` of padding."""
        rows = self.rows
        n = 0 if plan is None else len(plan.rows)
        if n:
            size = self._size_of[n - 1]
        host = self._ring.take()
        views = host.views
        updates = None
        if plan is not None:
            if plan.new_rows is not None:
                rows.set_params(plan.new_rows)
            updates = plan.block_updates
            if len(updates.rows) > size:  # a newcomer with all of its blocks in the cache
                rows.update_blocks(updates)
                updates = None
            views["token_ids"][:n] = plan.token_ids
            views["positions"][:n] = plan.positions
            views["slots"][:n] = plan.slots
            views["rows"][:n] = views["rows_32"][:n] = plan.rows
            views["seq_lens"][:n] = plan.seq_lens
        views["query_start"][: n + 1] = self._counting[: n + 1]
        if n < size:
            views["query_start"][n + 1 : size + 1] = n
            views["slots"][n:size] = -1
            views["rows"][n:size] = views["rows_32"][n:size] = rows.padding_row
            for name in ("token_ids", "positions", "seq_lens"):
                views[name][n:size] = 0
        changed = 0
        if updates is not None and len(updates.rows):
            changed = len(updates.rows)
            views["update_rows"][:changed] = updates.rows
            views["update_columns"][:changed] = updates.columns
            views["update_blocks"][:changed] = updates.blocks
        views["update_rows"][changed:size] = rows.padding_row
        views["update_columns"][changed:size] = views["update_blocks"][changed:size] = 0
        self._inputs.memory.copy_(host.memory, non_blocking=True)
        self._ring.sent(host)
        return size

    def forward(self, size: int) -> None:
        """Compute the hidden states of the first `size` sequences."""
        inputs, rows = self._inputs, self.rows
        rows.block_tables[inputs.update_rows[:size], inputs.update_columns[:size]] = inputs.update_blocks[:size]
        known = inputs.token_ids[:size]
        token_ids = torch.where(known == PENDING, rows.last_tokens[inputs.rows[:size]], known)
        metadata = AttentionMetadata(
            query_start=inputs.query_start[: size + 1],
            seq_lens=inputs.seq_lens[:size],
            block_tables=rows.block_tables,
            rows=inputs.rows_32[:size],
            slots=inputs.slots[:size],
            max_query_len=1,
            max_seq_len=self._max_seq_len,
        )
        hidden = self.model.forward(token_ids, inputs.positions[:size], self.caches, metadata)
        self.hidden[:size].copy_(hidden)

    def sample_inputs(self, plan: StepPlan) -> SampleInputs:
        """For a sampling that is not `sample`: of the sequences of `plan` alone, with what only some of them need."""
        n = len(plan.rows)
        return SampleInputs(
            rows=self._inputs.rows[:n],
            positions=self._inputs.positions[:n] + 1,
            forbidden=self.rows.forbidden(plan),
            extras=self.rows.extras(plan),
        )

    def sample(self, size: int, mode: SamplingMode) -> None:
        """Choose the first `size` sequences' next tokens, and keep them for the step after."""
        inputs, rows = self._inputs, self.rows
        at = inputs.rows[:size]
        logits = self.model.logits(self.hidden[:size])
        tokens = choose(logits, at, inputs.positions[:size] + 1, rows, mode, unseen=True)
        rows.last_tokens[at] = tokens
        self.tokens[:size].copy_(tokens)
