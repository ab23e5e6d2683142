"""One tensor-parallel rank, as a Ray actor: loads its part of the model and computes what the leader sends."""

import gc
import json
import logging
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray

from engine.config import EngineConfig
from engine.remote.channel import Receiver, Sender, keep_waiting
from engine.remote.lifeline import hold
from engine.remote.runner import serve_rank
from engine.remote.shm_ring import Ring, RingReader, RingWriter
from engine.remote.tcp_link import TcpLink
from engine.runner import RankRunner

START_S = 1800.0
"""Seconds in which the ranks must have loaded the model."""


@dataclass(frozen=True, slots=True)
class Rank:
    """Which of how many; address: of its node."""

    index: int
    size: int
    address: str


MakeRunner = Callable[[EngineConfig, Rank, Any], RankRunner]
"""What computes on a rank, from the settings and the store (of `torch.distributed`) at which the ranks meet."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a shard's process is."""

    node_id: str
    pid: int


@dataclass(frozen=True, slots=True)
class Entrance:
    """How a shard reaches its leader. plans: a ring on its node and its number there; results: a ring; None: by TCP."""

    door: tuple[str, int]
    key: bytes
    plans: tuple[str, int] | None
    results: str | None


class Shard:
    """Under `ray.remote`; the calls come in this order, and `run` lasts."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = Rank(rank, size, ray.util.get_node_ip_address())

    def place(self) -> Place:
        return Place(ray.get_runtime_context().get_node_id(), os.getpid())

    def open_store(self) -> tuple[str, int]:
        """On rank 0: where the ranks will meet. The system chooses the port, so two engines never want the same."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # its stubs lack it

        self._store = TCPStore(self._rank.address, 0, self._rank.size, is_master=True, wait_for_workers=False)
        return self._rank.address, self._store.port

    def run(self, config: EngineConfig, store: tuple[str, int], entrance: Entrance, make_runner: MakeRunner) -> None:
        """Compute until the leader has no more; when its process is gone, this one ends too.

        Raises what goes wrong: the group is lost then.
        """
        logging.basicConfig(level=logging.INFO)
        hold(self._enter(entrance, "lifeline"), config.shard_timeout_s)
        plans: Receiver
        results: Sender
        if entrance.plans is not None:
            address, reader = entrance.plans
            plans = RingReader(Ring.open(address), reader)
            results = RingWriter(Ring.open(entrance.results)) if entrance.results else _Nowhere()
        else:
            plans = link = self._enter(entrance, "steps")
            results = link if self._rank.index == 0 else _Nowhere()
        runner = make_runner(config, self._rank, self._meet(store))
        gc.freeze()
        results.send(pickle.dumps(runner.info), START_S)
        try:
            serve_rank(runner, plans, results)
        finally:
            runner.close()

    def _enter(self, entrance: Entrance, purpose: str) -> TcpLink:
        link = TcpLink.connect(entrance.door, entrance.key, 10.0)
        link.send(json.dumps([purpose, self._rank.index]).encode(), 10.0)
        return link

    def _meet(self, store: tuple[str, int]) -> Any:
        if self._rank.index == 0:
            return self._store
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # its stubs lack it

        return TCPStore(*store, self._rank.size, is_master=False, wait_for_workers=False)


class _Nowhere:
    """Where the results of the ranks behind the first go: they are the same."""

    def send(self, message: bytes, timeout_s: float, check: Callable[[], None] = keep_waiting) -> None:
        pass


def load_rank(config: EngineConfig, rank: Rank, store: Any) -> RankRunner:
    """A rank of the model that `config` names."""
    from engine.device.precision import choose_device
    from engine.hub import resolve_model
    from engine.parallel.group import ParallelGroup
    from engine.runner_setup import load_runner

    path = resolve_model(config.model)
    device = choose_device(config)
    group = ParallelGroup.connect(store, rank.index, rank.size, device, config.shard_timeout_s, rank.address)
    return load_runner(config, path, group)
