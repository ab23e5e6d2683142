"""The tensor-parallel ranks of one engine, and the `Runner` that leads them.

Each rank has a bundle of its own in the placement group. Those on the leader's node get their plans through shared
memory, those on other nodes over TCP.
"""

import atexit
import contextlib
import json
import logging
import math
import os
import pickle
import secrets
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from app.resources import SHARD_CPUS
from app.shard import START_S, Entrance, MakeRunner, Place, Shard, load_rank
from engine.config import EngineConfig
from engine.errors import EngineDeadError
from engine.remote.channel import ChannelTimeoutError, Receiver, Sender
from engine.remote.lifeline import Lifelines
from engine.remote.runner import RemoteRunner
from engine.remote.shm_ring import Ring, RingReader, RingWriter
from engine.remote.tcp_link import Door, TcpLink
from engine.runner import RunnerInfo

logger = logging.getLogger("ray.serve")

GOODBYE_S = 5.0
"""Seconds that shards get to end by themselves."""

_LOOK_S = 0.1
"""Between two looks at what the shards' processes have become."""


def lead_shards(config: EngineConfig, on_lost: Callable[[], Any]) -> "ShardedRunner":
    """The runner of a replica, whose shards are to be in the bundles behind its own.

    on_lost: as in `ShardedRunner`. Raises as `ShardGroup` does.
    """
    bundles = ray.util.get_current_placement_group()
    return ShardedRunner(ShardGroup(config, (bundles, 1)), config.shard_timeout_s, on_lost)


class ShardGroup:
    """The actors of one engine's ranks. Whoever makes it must `end` or `kill` it.

    bundles: the placement group, and the index there of rank 0's bundle; the other ranks' follow.
    Raises what a shard raises: `ConfigError`, `LoadError`; `EngineDeadError` for one that is lost on the way.
    """

    def __init__(
        self, config: EngineConfig, bundles: tuple[PlacementGroup, int], make_runner: MakeRunner = load_rank
    ) -> None:
        self.size = config.tensor_parallel_size
        self.silence_s = math.inf  # while they load: imports let no other thread speak
        self._links: dict[tuple[str, int], TcpLink] = {}
        self._rings: list[Ring] = []
        self._local: dict[int, int] = {}  # descriptors of the processes on this node, by rank
        self._runs: list[Any] = []
        self._lifelines: Lifelines | None = None
        self._ending = threading.Lock()
        group, first = bundles
        self._actors = [
            ray.remote(Shard)
            .options(
                num_cpus=SHARD_CPUS,
                num_gpus=group.bundle_specs[first + rank].get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=group, placement_group_bundle_index=first + rank
                ),
            )
            .remote(rank, self.size)
            for rank in range(self.size)
        ]
        try:
            self.info = self._start(config, make_runner)
        except BaseException:
            self.kill()
            raise
        self.silence_s = config.shard_timeout_s

    def _start(self, config: EngineConfig, make_runner: MakeRunner) -> RunnerInfo:
        self.places: list[Place] = ray.get([actor.place.remote() for actor in self._actors])
        here = ray.get_runtime_context().get_node_id()
        local = [rank for rank, place in enumerate(self.places) if place.node_id == here]
        self._local = {rank: os.pidfd_open(self.places[rank].pid) for rank in local}
        key = secrets.token_bytes(32)
        plans, results = Ring.create(len(local)), Ring.create(1)
        self._rings = [plans, results]
        store = ray.get(self._actors[0].open_store.remote())
        with contextlib.closing(Door(ray.util.get_node_ip_address(), key)) as door:
            for rank, actor in enumerate(self._actors):
                entrance = Entrance(
                    door.address,
                    key,
                    (plans.address, local.index(rank)) if rank in local else None,
                    results.address if rank == 0 and rank in local else None,
                )
                self._runs.append(actor.run.remote(config, store, entrance, make_runner))
            self._let_in(door, 2 * self.size - len(local))
        remote = [rank for rank in range(self.size) if rank not in local]
        self._lifelines = Lifelines({rank: self._links["lifeline", rank] for rank in range(self.size)})
        self.plans: list[Sender] = [self._links["steps", rank] for rank in remote]
        if local:
            self.plans.append(RingWriter(plans))
        self.results: Receiver = RingReader(results, 0) if 0 in local else self._links["steps", 0]
        info: RunnerInfo = pickle.loads(self.results.receive(START_S, self._raise_if_lost))
        where = [f"{place.pid} on {place.node_id[:8]}" for place in self.places]
        logger.info("%d shards run: processes %s.", self.size, ", ".join(where))
        return info

    def _let_in(self, door: Door, count: int) -> None:
        """Wait for so many connections."""
        deadline = time.monotonic() + START_S
        while len(self._links) < count:
            self._raise_if_lost()
            if time.monotonic() > deadline:
                raise EngineDeadError(f"not all shards came: {sorted(self._links)} of {count} connections")
            if (link := door.accept(_LOOK_S)) is not None:
                with contextlib.suppress(ChannelTimeoutError):
                    purpose, rank = json.loads(link.receive(5.0))
                    self._links[purpose, rank] = link

    def _raise_if_lost(self) -> None:
        if (failed := self._failed_run()) is not None:
            raise failed[1]
        if self._lifelines is not None and (reason := self._lifelines.find_lost(0.0, self.silence_s)) is not None:
            raise EngineDeadError(reason)

    def find_lost(self) -> str | None:
        """Listen for a moment; how a shard was lost, or None."""
        assert self._lifelines is not None
        reason = self._lifelines.find_lost(_LOOK_S, self.silence_s)
        if (failed := self._failed_run()) is None:
            return reason
        rank, error = failed
        return str(error) if isinstance(error, EngineDeadError) else f"shard {rank} failed: {error!r}"

    def _failed_run(self) -> tuple[int, Exception] | None:
        """A rank, and what it has raised."""
        done, _ = ray.wait(self._runs, num_returns=1, timeout=0)
        for run in done:
            rank = self._runs.index(run)
            try:
                ray.get(run)
            except RayTaskError as error:
                return rank, error.cause
            except RayActorError:
                return rank, EngineDeadError(f"the process of shard {rank} has ended")
        return None

    def end(self) -> None:
        """Wait for the shards, which have been told that there is no more to do, and end their processes."""
        ray.wait(self._runs, num_returns=len(self._runs), timeout=GOODBYE_S)
        self.kill()

    def kill(self) -> None:
        """End the shards' processes at once, those that are stopped too; idempotent."""
        with self._ending:
            for descriptor in self._local.values():
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                os.close(descriptor)
            self._local = {}
            for actor in self._actors:
                with contextlib.suppress(Exception):  # a Ray that has ended took its actors along
                    ray.kill(actor, no_restart=True)
            self._actors = []
            for link in self._links.values():
                link.close()
            for ring in self._rings:
                ring.close()


class ShardedRunner(RemoteRunner):
    """Leads a `ShardGroup`, which ends with it.

    on_lost: called in another thread once a shard is lost and the others have been killed.
    """

    def __init__(self, group: ShardGroup, timeout_s: float, on_lost: Callable[[], Any] = lambda: None) -> None:
        super().__init__(group.info, group.plans, group.results, timeout_s)
        self._group = group
        self._on_lost = on_lost
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="shard-watch", daemon=True)
        self._watcher.start()
        atexit.register(self.close)  # before Ray, which the watcher asks

    def lose(self, reason: str) -> None:
        if self.lost is None:
            logger.error("the engine has lost its shards: %s", reason)
        super().lose(reason)
        self._group.kill()

    def close(self) -> None:
        if self._closing.is_set():
            return
        self._closing.set()
        atexit.unregister(self.close)
        if threading.current_thread() is not self._watcher:
            self._watcher.join()
        if self.lost is None:
            with contextlib.suppress(EngineDeadError):
                super().close()
            self._group.end()

    def _watch(self) -> None:
        while not self._closing.is_set() and self.lost is None:
            reason = self._group.find_lost()
            if reason is not None and not self._closing.is_set():
                self.lose(reason)
        if self.lost is not None and not self._closing.is_set():
            self._on_lost()
