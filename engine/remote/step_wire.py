"""Plans and results as bytes, for runners in other processes.

What every plan has goes as whole numbers one after another, which costs a tenth of pickling it; what few plans have is
pickled behind that. A plan for the sequences of the one before it does not name them again.
"""

import pickle
from typing import Any

import numpy as np

from engine.remote.sent_adapters import AdapterReceiver, AdapterSender
from engine.step import BlockUpdates, Ints, SamplingMode, StepPlan, StepResult

_HEAD = 8
"""Whole numbers ahead of the arrays: S, T, K, U (block updates), P (-1: None), mode, whether the sequences are those of
the plan before, whether something pickled comes last."""

Sequences = tuple[Ints, Ints, Ints]
"""rows, query_start and sample of a plan."""

_NO_SEQUENCES: Sequences = (np.empty(0, np.int32),) * 3


class PlanEncoder:
    """Its plans are to be decoded in their order by one `PlanDecoder`, or by several, made for as many adapters."""

    def __init__(self, max_loras: int = 0) -> None:
        self._before = _NO_SEQUENCES
        self._adapters = AdapterSender(max_loras)

    def encode(self, plan: StepPlan) -> bytes:
        before, updates, pending = self._before, plan.block_updates, plan.pending
        same = plan.rows is before[0] and plan.query_start is before[1] and plan.sample is before[2]
        adapters = None if plan.adapters is None else self._adapters.pack(plan.adapters)
        rare = plan.new_rows, plan.forbidden, plan.extras, plan.copies, adapters
        has_rare = any(part is not None for part in rare)
        head = (
            len(plan.rows), len(plan.token_ids), len(plan.sample), len(updates.rows),
            -1 if pending is None else len(pending), plan.mode, same, has_rare,
        )  # fmt: skip
        arrays: list[Any] = [
            plan.seq_lens, plan.token_ids, plan.positions, updates.rows, updates.columns, updates.blocks,
        ]  # fmt: skip
        if pending is not None:
            arrays.append(pending)
        sequences = plan.rows, plan.query_start, plan.sample
        if not same:
            arrays += sequences
        numbers = np.concatenate(arrays, dtype=np.int32, casting="same_kind")
        message = b"".join((
            np.array(head, np.int32).tobytes(),
            plan.slots.tobytes(),
            numbers.tobytes(),
            pickle.dumps(rare, protocol=5) if has_rare else b"",
        ))  # fmt: skip
        self._before = sequences  # not of a plan that pickle does not take
        return message


class PlanDecoder:
    """The other end of a `PlanEncoder`. The arrays of a plan lie in its message, or in that of an earlier one."""

    def __init__(self, max_loras: int = 0) -> None:
        self._before = _NO_SEQUENCES
        self._adapters = AdapterReceiver(max_loras)

    def decode(self, message: bytearray) -> StepPlan:
        head = np.frombuffer(message, np.int32, _HEAD).tolist()
        num_rows, num_tokens, num_samples, num_updates, num_pending, mode, same, has_rare = head
        slots = np.frombuffer(message, np.int64, num_tokens, 4 * _HEAD)
        begin = 4 * _HEAD + 8 * num_tokens
        lengths = [num_rows, num_tokens, num_tokens, *[num_updates] * 3, max(num_pending, 0)]
        if not same:
            lengths += num_rows, num_rows + 1, num_samples
        count = sum(lengths)
        numbers = np.frombuffer(message, np.int32, count, begin)
        parts = []
        at = 0
        for length in lengths:
            parts.append(numbers[at : at + length])
            at += length
        if not same:
            self._before = parts[7], parts[8], parts[9]
        rows, query_start, sample = self._before
        seq_lens, token_ids, positions = parts[:3]
        new_rows, forbidden, extras, copies, adapters = (
            pickle.loads(memoryview(message)[begin + 4 * count :]) if has_rare else (None,) * 5
        )
        return StepPlan(
            rows=rows,
            query_start=query_start,
            seq_lens=seq_lens,
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            sample=sample,
            mode=SamplingMode(mode),
            block_updates=BlockUpdates(*parts[3:6]),
            new_rows=new_rows,
            pending=None if num_pending < 0 else parts[6],
            forbidden=forbidden,
            extras=extras,
            copies=copies,
            adapters=None if adapters is None else self._adapters.unpack(*adapters),
        )


def encode_result(result: StepResult) -> bytes:
    if result.logprobs is None and result.prompt_logprobs is None:
        return result.token_ids.astype(np.int64, copy=False).tobytes() + b"\0"
    return pickle.dumps(result, protocol=5) + b"\1"


def decode_result(message: bytearray) -> StepResult:
    if message[-1]:
        result: StepResult = pickle.loads(memoryview(message)[:-1])
        return result
    return StepResult(np.frombuffer(message, np.int64, len(message) // 8))
