"""The ranks of tensor parallelism, and what they tell each other: sums, slices of logits, chosen tokens.

A group is an object of its own, made from a store at which its ranks meet; nothing of it is global, so groups on one
host know nothing of each other. On a GPU it is NCCL. On a CPU it is gloo, with sums of our own: every rank gets all of
the others' numbers and adds them in the order of ranks. So all have the same bits, whatever else is in the batch (a
ring begins elsewhere in each part of a tensor), and a decode step waits for one exchange instead of a ring's rounds.
Ranks on one host add and gather through shared memory, and exchange what is small there.
"""

import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from engine.errors import EngineDeadError, RankLeftError
from engine.parallel.host_exchange import MAX_BYTES, HostExchange
from engine.remote.channel import ChannelClosedError
from kernels.shared_sum import reference as add_in_order

START_TIMEOUT_S = 600.0
"""For what ranks do once, when some have loaded their weights long before others."""

_SMALL = 1 << 15
"""Elements from which gloo's ring is faster than an exchange; with two ranks its sums are the same."""


class RankLostError(EngineDeadError):
    """A rank did not answer in time: the group is of no more use, and all its ranks must be replaced."""


class ParallelGroup:
    """`size` ranks that run the same steps, each with its slice of the weights. Collectives must be called by all ranks
    in the same order, and raise `RankLostError` or `RankLeftError` when one does not come.

    local_size: how many of the ranks share this host.
    """

    def __init__(
        self, store: Store, rank: int, size: int, device: torch.device, timeout_s: float, address: str
    ) -> None:
        """See `connect`."""
        self.rank = rank
        self.size = size
        self.local_size = size
        self.device = device
        self.timeout_s = timeout_s
        self._store = store
        self._address = address
        self._meetings = 0
        self._backend: Any = _Closed()
        self._exchange: HostExchange | None = None
        self._on_cpu = device.type == "cpu"
        self._first = _options(dist.BroadcastOptions, rootRank=0, rootTensor=0)
        self._to_first = _options(dist.GatherOptions, rootRank=0)

    @classmethod
    def connect(
        cls,
        store: Store,
        rank: int,
        size: int,
        device: torch.device,
        timeout_s: float = 30.0,
        address: str = "",
    ) -> Self:
        """Meet the other ranks at `store`, such as a `torch.distributed.TCPStore` that rank 0 opened at port 0.

        timeout_s: seconds that a collective of a step may take. address: of this rank, to which others on a CPU
        connect; by default what the host's name resolves to. Raises `RankLostError` when the ranks do not all come.
        """
        group = cls(store, rank, size, device, timeout_s, address)
        group._meet()
        return group

    def _meet(self) -> Store:
        """Connect to the other ranks; returns the place at the store where they did."""
        rank, size = self.rank, self.size
        start = timedelta(seconds=START_TIMEOUT_S)
        self._meetings += 1
        store = PrefixStore(f"nanoserve {self._meetings}", self._store)
        backend: Any
        try:
            if self._on_cpu:
                # torch's stubs lack it, and without it a group takes whatever device the host's name leads to.
                options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
                make = dist.ProcessGroupGloo.create_device
                options._devices = [make(hostname=self._address or _own_name())]
                options._timeout = start
                backend = dist.ProcessGroupGloo(store, rank, size, options)
                backend.set_timeout(timedelta(seconds=self.timeout_s))
            else:
                options = dist.ProcessGroupNCCL.Options()
                # A thread of NCCL's ends the process that waits longer.
                options._timeout = timedelta(seconds=self.timeout_s)
                backend = dist.ProcessGroupNCCL(store, rank, size, options)
            store.set(f"host {rank}", _host())
            hosts = [store.get(f"host {other}") for other in range(size)]
        except (RuntimeError, ValueError) as error:
            raise RankLostError(f"rank {rank} of {size} did not find the others: {error}") from error
        self._backend = backend
        self.local_size = hosts.count(hosts[rank])
        if self._on_cpu and size > 1:
            self._exchange = HostExchange.meet(store, rank, size)
            if not self.min(self._exchange is not None) and self._exchange is not None:
                self._exchange.close()
                self._exchange = None
        return store

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, of any one shape; x may be overwritten."""
        x = x.contiguous()
        if not x.numel():  # a layer's output where no token is sampled from
            return x
        if (exchange := self._exchange) is not None and exchange.adds(x):
            total: Tensor = self._wait("all_reduce", lambda: exchange.all_reduce(x, self.timeout_s))
            return total
        if self._on_cpu and (self.size > 2 or x.numel() < _SMALL):
            return add_in_order(self._all_gather(x))
        self._wait("all_reduce", lambda: self._backend.allreduce([x]).wait())
        return x

    def gather(self, x: Tensor, width: int) -> Tensor:
        """x: [n, columns], the same on all ranks -> on rank 0 the first `width` columns of all ranks' side by side,
        [n, width]; elsewhere [0, width]."""
        x = x.contiguous()
        parts: Sequence[Tensor]
        if (exchange := self._exchange) is not None and exchange.adds(x):
            gathered: Tensor | None = self._wait("gather", lambda: exchange.gather(x, self.timeout_s))
            parts = () if gathered is None else gathered.unbind()
        elif self._by_memory(x):
            parts = self._all_gather(x, used=self.rank == 0)
        else:
            parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else []
            results = [parts] if parts else []
            self._wait("gather", lambda: self._backend.gather(results, [x], self._to_first).wait())
        if self.rank > 0:
            return x.new_empty(0, width)
        columns = x.shape[1]
        return torch.cat([part[:, : max(0, width - i * columns)] for i, part in enumerate(parts)], dim=1)

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's x, written over the others' x of the same shape and type."""
        if (exchange := self._by_memory(x)) is None:
            self._wait("broadcast", lambda: self._backend.broadcast([x], self._first).wait())
        elif self.rank == 0:
            self._wait("broadcast", lambda: exchange.send(x, self.timeout_s))
        else:
            x.copy_(self._wait("broadcast", lambda: exchange.receive(0, x, self.timeout_s)))
        return x

    def min(self, value: int) -> int:
        """The smallest of the ranks' values. Waits for ranks that still start."""
        smallest = torch.tensor([value], dtype=torch.int64, device=self.device)
        options = _options(
            dist.AllreduceOptions, reduceOp=dist.ReduceOp.MIN, timeout=timedelta(seconds=START_TIMEOUT_S)
        )
        self._wait("min", lambda: self._backend.allreduce([smallest], options).wait(), START_TIMEOUT_S)
        return int(smallest)

    def leave(self) -> bool:
        """This rank will not bring what the others wait for: they get `RankLeftError`, now or in their next collective,
        until all `meet_again`. False where that cannot be: on a GPU nothing ends what they have put on their streams.
        """
        if not self._on_cpu:
            return False
        if self._exchange is not None:
            self._exchange.give_up()
        self.close()
        return True

    def meet_again(self, word: str) -> list[str]:
        """Begin anew after a step in which some rank left; returns the words of all ranks, in their order.

        Nobody comes here who has not done with that step. Raises as `connect` does.
        """
        self.leave()
        store = self._meet()
        try:
            store.set(f"word {self.rank}", word)
            return [store.get(f"word {other}").decode() for other in range(self.size)]
        except RuntimeError as error:
            raise RankLostError(f"rank {self.rank} of {self.size} did not find the others again: {error}") from error

    def close(self) -> None:
        """Leave the group; idempotent. The others' next collective fails."""
        backend, self._backend = self._backend, _Closed()
        if not isinstance(backend, _Closed):
            backend.shutdown()
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None

    def _by_memory(self, x: Tensor) -> HostExchange | None:
        """What brings x to the others through shared memory, if that is the way for it; the same on all ranks."""
        return self._exchange if x.numel() * x.element_size() <= MAX_BYTES else None

    def _all_gather(self, x: Tensor, used: bool = True) -> list[Tensor]:
        """Every rank's x, in the order of ranks; of this one it may be x itself. used: whether they are, here."""
        if (exchange := self._by_memory(x)) is not None:
            parts: list[Tensor] = self._wait("all_gather", lambda: exchange.all_gather(x, self.timeout_s, used))
            return parts
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._wait("all_gather", lambda: self._backend.allgather([parts], [x]).wait())
        return parts

    def _wait(self, what: str, exchange: Callable[[], Any], timeout_s: float | None = None) -> Any:
        """On a GPU the stream waits, not the host."""
        limit = timeout_s or self.timeout_s
        began = time.monotonic()
        try:
            return exchange()
        except (RuntimeError, TimeoutError, ChannelClosedError) as error:
            late = time.monotonic() - began >= limit
            if self._exchange is not None:
                self._exchange.give_up()
            self.close()  # what comes late would be taken for the answer to something else
            waited = f"rank {self.rank} of {self.size} waited for the others in {what}: one "
            if late or not self._on_cpu:
                raise RankLostError(f"{waited}did not answer in {limit:g} s") from error
            raise RankLeftError(f"{waited}has left the group, or its process has ended") from error


class _Closed:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("the group is closed")


def _options(kind: type[Any], **values: Any) -> Any:
    options = kind()
    for name, value in values.items():
        setattr(options, name, value)
    return options


def _own_name() -> str:
    """The host's name where it resolves, as it may not in a container."""
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return "127.0.0.1"
    return name


def _host() -> str:
    """The same for processes that share a machine's cores."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text() if boot.is_file() else socket.gethostname()
