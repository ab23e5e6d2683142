"""Which engine replica a request goes to: the one that has most of its prompt in the cache, unless that is too busy.

`Affinity` weighs, in KV blocks, what a replica would have to compute of the prompt against what waits there. What is
cached where is known from what was sent where, by the digests of the prompt's blocks, which are the engine's own;
nothing is asked of anybody for a request. Where nothing is known yet, rendezvous hashing (Thaler and Ravishankar,
1998) on the beginning of the prompt, or on the session, lets ingress replicas agree without talking. Serve's own
numbers tell how busy a replica is: each answer carries the length of its queue, and the replicas report the state of
their caches (`app.signals`).

Serve sends this module to each caller by value: nothing of ours is imported but inside a function.
"""

import random
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica

MAX_KNOWN_BLOCKS = 200_000
"""Digests remembered of each replica, if its cache has that many blocks; some 150 bytes each."""

MAX_SESSIONS = 50_000

MAX_BLOCKS_LOOKED_AT = 2048
"""Of a prompt; what comes after them goes where they are."""

HOME_BLOCK = 3
"""The block, from 0, whose digest says where an unknown prompt is at home: deep enough to tell system prompts apart."""

FULL_KV = 0.05
"""Share of free KV below which a replica would have to preempt for another request."""


@dataclass(frozen=True, slots=True)
class Busy:
    """requests: that a replica has, of `slots` that it can run at once. kv_free: share of its KV cache that no running
    request holds. blocks: of its KV cache."""

    requests: int = 0
    slots: int = 8
    kv_free: float = 1.0
    blocks: int = MAX_KNOWN_BLOCKS


class Affinity:
    """The choice alone, without Serve. Replicas are names."""

    def __init__(self) -> None:
        self._known: dict[str, OrderedDict[bytes, None]] = {}  # of each replica, least recently used first
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._mean_blocks = 8.0

    def rank(
        self, hashes: Sequence[bytes], session: str | None, replicas: Mapping[str, Busy]
    ) -> tuple[list[str], dict[str, int]]:
        """Replicas, best first, and how many leading blocks of the prompt each is thought to have."""
        found = self.found(hashes, replicas)
        known = any(found.values())
        home = None if known and session is None else self._home(hashes, session, replicas)
        costs = {name: self._cost(len(hashes), found[name], name == home, busy) for name, busy in replicas.items()}
        ranked = sorted(replicas, key=lambda name: (costs[name], random.random()))
        if ranked:
            least = min(ranked, key=lambda name: replicas[name].requests)
            if _is_left_out(replicas[least], replicas[ranked[0]]):
                ranked.remove(least)
                ranked.insert(0, least)
        return ranked, found

    def learn(self, hashes: Sequence[bytes], session: str | None, replica: str, busy: Busy) -> None:
        """A request was sent to `replica`: its prompt will be in the cache there, and what is used least no more."""
        self._mean_blocks += 0.05 * (max(1, len(hashes)) - self._mean_blocks)
        known = self._known.setdefault(replica, OrderedDict())
        # As the engine does: the end of a chain is forgotten before its beginning.
        for digest in reversed(hashes[:MAX_BLOCKS_LOOKED_AT]):
            known[digest] = None
            known.move_to_end(digest)
        while len(known) > min(busy.blocks, MAX_KNOWN_BLOCKS):
            known.popitem(last=False)
        if session is not None:
            self._sessions[session] = replica
            self._sessions.move_to_end(session)
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)

    def found(self, hashes: Sequence[bytes], replicas: Collection[str]) -> dict[str, int]:
        """How many leading blocks of a prompt each replica is thought to have."""
        return {name: self._depth(hashes, name) for name in replicas}

    def _depth(self, hashes: Sequence[bytes], replica: str) -> int:
        known = self._known.get(replica)
        if known is None:
            return 0
        # Who has a block has all before it.
        low, high = 0, min(len(hashes), MAX_BLOCKS_LOOKED_AT)
        while low < high:
            middle = (low + high) // 2
            if hashes[middle] in known:
                low = middle + 1
            else:
                high = middle
        return low

    def _home(self, hashes: Sequence[bytes], session: str | None, replicas: Collection[str]) -> str | None:
        if session is not None:
            last = self._sessions.get(session)
            return last if last in replicas else max(replicas, key=lambda name: _weight(session, name), default=None)
        if not hashes:
            return None
        digest = hashes[min(HOME_BLOCK, len(hashes) - 1)].hex()
        return max(replicas, key=lambda name: _weight(digest, name), default=None)

    def _cost(self, num_blocks: int, found: int, at_home: bool, busy: Busy) -> float:
        """Blocks to compute, and those that others have to be computed or decoded first.

        Below its places a replica slows down little as they fill. A request over them waits for one to end, which takes
        as long as half a prompt of the usual length or more.
        """
        usual = self._mean_blocks
        # Others will have sent its like home: if not by load, they all send it to the same one.
        missing = -0.5 * usual if at_home else float(num_blocks - found)
        queue = (0.25 * busy.requests / busy.slots + 0.5 * max(0, busy.requests - busy.slots)) * usual
        return missing + queue + (usual + num_blocks if busy.kv_free < FULL_KV else 0.0)

    def forget(self, gone: Collection[str]) -> None:
        """Replicas that are no more."""
        for name in gone:
            self._known.pop(name, None)


def _is_left_out(least: Busy, best: Busy) -> bool:
    """Whether a replica has so little beside the best for a prompt that it should learn the prompt too: a new one knows
    none, and would otherwise get nothing before all others are full."""
    return best.requests > 2 * least.requests + best.slots / 4


def _weight(key: str, replica: str) -> int:
    return int.from_bytes(blake2b(f"{key}/{replica}".encode(), digest_size=8).digest(), "big")


class AffinityRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types
    """Serve's face of `Affinity`, on handles of the engine deployment.

    Calls without block hashes (control calls) go to the least busy. No FIFOMixin: each request has a choice of its own.
    """

    def initialize_state(self, **_: Any) -> None:
        from app.pool import engine_pool

        self._affinity = Affinity()
        self._pool = engine_pool

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        before = {replica_id.unique_id for replica_id in self._replica_id_set}
        super().update_replicas(replicas)
        names = {replica_id.unique_id for replica_id in self._replica_id_set}
        self._affinity.forget(before - names)
        self._pool.update(names)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._affinity.forget({replica_id.unique_id})
        self._pool.update({replica_id.unique_id for replica_id in self._replica_id_set})

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks of one replica each: Serve tries the next when one is full, and then again after a pause."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        hashes, session = _keys(pending_request)
        ranked, _ = self._affinity.rank(hashes, session, {name: self._busy(r) for name, r in by_name.items()})
        return [[by_name[name]] for name in ranked]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        hashes, session = _keys(pending_request)
        name = replica_id.unique_id
        if hashes or session:
            self._pool.note(name, len(hashes), self._affinity.found(hashes, [name])[name])
            replica = self._replicas.get(replica_id)
            self._affinity.learn(hashes, session, name, Busy() if replica is None else self._busy(replica))

    def _busy(self, replica: RunningReplica) -> Busy:
        """By the length of its queue as of its last answer, or as it reported when that is too long ago."""
        stats = replica.routing_stats or {}
        requests = self._replica_queue_len_cache.get(replica.replica_id)
        if requests is None:
            requests = int(stats.get("load", 0))
            # Known well enough, so that Serve does not ask the replica first; a full one would refuse.
            self._replica_queue_len_cache.update(replica.replica_id, requests)
        return Busy(
            requests,
            int(stats.get("slots", 8)),
            float(stats.get("kv_free", 1.0)),
            int(stats.get("blocks", MAX_KNOWN_BLOCKS)),
        )


def _keys(request: PendingRequest | None) -> tuple[Sequence[bytes], str | None]:
    """Block hashes and session of a submission; none for other calls."""
    submission = request.args[0] if request is not None and request.args else None
    return getattr(submission, "block_hashes", None) or (), getattr(submission, "session", None)
