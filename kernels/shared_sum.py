"""Sums and gathers of tensors over processes of one machine, through memory that they share.

Used by ranks that share a model on a CPU: two sums a layer, each of a few kilobytes in a decode step, for which a
socket takes ten times as long. A rank writes its tensor, raises its number, and reads the others' once they have raised
theirs; who waits looks for some microseconds and then sleeps on a futex (Franke, Russell and Kirkwood, 2002), since
there may be more ranks than cores. Terms are added in the order of ranks: all get the same bits.
"""

import mmap
import time
from collections.abc import Callable

import torch
from torch import Tensor

from kernels import cpu_ops

LINE = 64
"""Bytes of a rank's counters; `kSumLine` in the C++ kernel."""

PIECE = 64 << 10
"""Numbers that go at once: larger tensors are summed one piece after another."""

_GIVEN_UP = 8
"""Where among a rank's counters it says so."""

_LOOK_S = 0.1
"""Between two looks whether waiting still makes sense."""


def memory_size(size: int) -> int:
    """Bytes of the memory that `size` ranks share, all zero at first."""
    return size * (LINE + 2 * 4 * PIECE)


class SharedSum:
    """One rank's end. Calls must come in the same order on all ranks, with tensors of the same size. What is waited for
    is waited for as `__call__` says. Needs `cpu_ops.load()`.
    """

    def __init__(self, memory: mmap.mmap, rank: int, size: int) -> None:
        """memory: of memory_size(size) bytes, mapped by all."""
        assert cpu_ops.load()
        self._memory = torch.frombuffer(memory, dtype=torch.uint8)
        self._rank, self._size = rank, size
        self._number = 0

    def __call__(self, x: Tensor, timeout_s: float, check: Callable[[], None]) -> Tensor:
        """x: contiguous float32, overwritten with the sum of all ranks' x.

        Raises `TimeoutError` when a rank does not come in time, `RuntimeError` when one has given up, and what `check`
        raises, which is called several times a second while this waits.
        """
        deadline = time.monotonic() + timeout_s
        for piece in (x,) if x.numel() <= PIECE else x.view(-1).split(PIECE):
            self._number += 1
            at = self._memory, self._rank, self._size, self._number, _LOOK_S
            while (late := cpu_ops.shared_sum(piece, *at)) >= 0:
                self._keep_waiting(late, deadline, timeout_s, check)
        return x

    def gather(self, x: Tensor, timeout_s: float, check: Callable[[], None]) -> Tensor | None:
        """x: contiguous float32 -> on the first rank all ranks' x, [size, numbers]."""
        deadline = time.monotonic() + timeout_s
        flat = x.view(-1)
        out = flat.new_empty(self._size, len(flat)) if self._rank == 0 else None
        for first in range(0, max(len(flat), 1), PIECE):
            self._number += 1
            at = self._memory, self._rank, self._size, self._number, _LOOK_S
            part = None if out is None else out[:, first : first + PIECE]
            while (late := cpu_ops.shared_gather(flat[first : first + PIECE], *at, part)) >= 0:
                self._keep_waiting(late, deadline, timeout_s, check)
        return out

    def give_up(self) -> None:
        """What this rank has brought is of no use to anybody: the others are to know."""
        self._memory[self._rank * LINE + _GIVEN_UP] = 1

    def _keep_waiting(self, late: int, deadline: float, timeout_s: float, check: Callable[[], None]) -> None:
        check()
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank {late} did not come for {timeout_s:g} s")


def reference(terms: list[Tensor]) -> Tensor:
    """terms: every rank's tensor; the first is overwritten."""
    total = terms[0]
    for term in terms[1:]:
        total += term
    return total
