"""Tensors among ranks of one host, through shared memory.

A connection, such as gloo's, hands each message to a thread at either end; here only the rank that waits is woken. Sums
and gathers have memory of their own, which C++ writes and reads; all else, and these where nothing could compile it,
goes through rings: each rank writes one that all others read.
"""

import logging
import os
import select
from typing import Self

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from engine.remote.channel import ChannelClosedError
from engine.remote.host_memory import HostMemory
from engine.remote.shm_ring import SLOT_BYTES, SLOTS, Ring, RingReader, RingWriter
from kernels import cpu_ops
from kernels.shared_sum import SharedSum, memory_size

logger = logging.getLogger(__name__)

MAX_BYTES = SLOTS // 4 * SLOT_BYTES
"""Of a tensor in a ring. A rank may be one exchange ahead of another, so two of them at most wait in it to be read."""


class HostExchange:
    """This rank's end: a writer to all others, and a reader of each. Calls must come in the same order on all ranks."""

    def __init__(self, ring: Ring, rings: dict[int, Ring], rank: int, sums: HostMemory | None) -> None:
        """rings: of the other ranks. Raises `OSError` if the process of one is gone."""
        self._ring = ring
        self._writer = RingWriter(ring)
        self._readers = {other: RingReader(theirs, rank - (rank > other)) for other, theirs in rings.items()}
        self._rings = rings
        self._rank = rank
        self._sums = sums
        self._sum = None if sums is None else SharedSum(sums.mapped, rank, 1 + len(rings))
        self._ends = select.poll()
        self._processes = [os.pidfd_open(theirs.pid) for theirs in rings.values()]
        for process in self._processes:
            self._ends.register(process, select.POLLIN)

    @classmethod
    def meet(cls, store: Store, rank: int, size: int) -> Self | None:
        """None where this rank cannot reach all others, which may have met it all the same."""
        ring = Ring.create(size - 1)
        sums = HostMemory.create(memory_size(size)) if rank == 0 and cpu_ops.load() else None
        # A process number means something in its own namespace alone.
        space = f"{_read('/proc/sys/kernel/random/boot_id')} {os.readlink('/proc/self/ns/pid')}"
        adds = sums.address if sums is not None else "yes" if cpu_ops.load() else ""
        store.set(f"exchange {rank}", f"{space}\n{ring.address}\n{adds}")
        met = [store.get(f"exchange {other}").decode().split("\n") for other in range(size)]
        spaces, addresses, all_add = zip(*met, strict=True)
        if sums is not None and not all(all_add):
            sums.close()
            sums = None
        try:
            if set(spaces) == {space}:
                if rank > 0 and all(all_add):
                    sums = HostMemory.open(all_add[0], memory_size(size))
                rings = {i: Ring.open(address) for i, address in enumerate(addresses) if i != rank}
                return cls(ring, rings, rank, sums)
        except OSError as error:
            logger.info("ranks of this host talk over connections: %s", error)
        ring.close()
        if sums is not None:
            sums.close()
        return None

    def adds(self, x: Tensor) -> bool:
        """Whether `all_reduce` and `gather` take it; the same on all ranks."""
        return self._sum is not None and x.dtype is torch.float32

    def all_reduce(self, x: Tensor, timeout_s: float) -> Tensor:
        """The sum of all ranks' x, which is overwritten. x: contiguous. Raises as `SharedSum` does."""
        assert self._sum is not None
        return self._sum(x, timeout_s, self._raise_if_gone)

    def gather(self, x: Tensor, timeout_s: float) -> Tensor | None:
        """On rank 0 all ranks' x, in the order of ranks, [ranks, *shape of x]. Otherwise as `all_reduce`."""
        assert self._sum is not None
        parts = self._sum.gather(x, timeout_s, self._raise_if_gone)
        return None if parts is None else parts.view(-1, *x.shape)

    def send(self, x: Tensor, timeout_s: float) -> None:
        """x: contiguous, of MAX_BYTES at most. Raises as `engine.remote.channel.Sender.send` does."""
        data = x.detach().reshape(-1).view(torch.uint8).numpy()
        self._writer.send(data.tobytes(), timeout_s, self._raise_if_gone)

    def receive(self, other: int, like: Tensor, timeout_s: float) -> Tensor:
        """What the other rank sent, of the shape and type of `like`.

        Good whoever has given up meanwhile: a rank that is ahead may already have failed in the next step, and this one
        must not fail in a step whose tokens are out.
        """
        message = self._readers[other].receive(timeout_s, lambda: self._raise_if_gone(other))
        return torch.frombuffer(message, dtype=like.dtype).view(like.shape)

    def all_gather(self, x: Tensor, timeout_s: float, used: bool) -> list[Tensor]:
        """Every rank's x, in the order of ranks; of this one x itself. used: whether this rank makes something of them;
        if not, it is good whoever has given up meanwhile, as in `receive`."""
        self.send(x, timeout_s)
        ranks = range(len(self._readers) + 1)
        parts = [x if rank == self._rank else self.receive(rank, x, timeout_s) for rank in ranks]
        if used:
            self._raise_if_given_up()  # what one has sent that did not wait for this one's is of no use
        return parts

    def give_up(self) -> None:
        """What others have sent and this rank has not waited for is of no use to anybody: they are to know."""
        self._ring.give_up()
        if self._sum is not None:
            self._sum.give_up()

    def close(self) -> None:
        """Let nobody else in; idempotent."""
        self._ring.close()
        if self._sums is not None:
            self._sums.close()
        for process in self._processes:
            os.close(process)
        self._processes = []

    def _raise_if_gone(self, other: int | None = None) -> None:
        """other: the rank that is waited for, None for all."""
        self._raise_if_given_up(other)
        if self._ends.poll(0):
            raise ChannelClosedError("the process of another rank has ended")

    def _raise_if_given_up(self, other: int | None = None) -> None:
        if any(ring.given_up for rank, ring in self._rings.items() if other in (None, rank)):
            raise ChannelClosedError("another rank has waited too long")


def _read(file: str) -> str:
    with open(file) as opened:
        return opened.read().strip()
