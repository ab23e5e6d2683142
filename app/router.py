"""Which engine replica a request goes to: the one that has most of its prompt in the cache, unless that is too busy.

What is cached where is known from what was sent where, by the digests of the prompt's blocks, which are the engine's
own; nothing is asked of anybody for a request. Rendezvous hashing (Thaler and Ravishankar, 1998) on the beginning of
the prompt, or on the session, puts the replicas in an order that all ingress replicas have without talking: the first
of it is the prompt's home. When that has too much, the next one that has little takes the prompt: to compute again what
is cached elsewhere costs nothing where hardly anything runs, and where much runs it holds up all of that, so then the
prompt stays. A beginning that many prompts have gets more homes. Serve's own numbers tell how busy a replica is: each
answer carries the length of its queue, and the replicas report the state of their caches (`app.reports.signals`).

Serve sends this module to each caller by value: nothing of ours is imported but inside a function.
"""

import random
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from ray.serve._private.request_router.common import ReplicaQueueLengthCache
from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica

MAX_KNOWN_BLOCKS = 200_000
"""Digests remembered of each replica, if its cache has that many blocks; some 150 bytes each."""

MAX_SESSIONS = 50_000

MAX_BLOCKS_LOOKED_AT = 2048
"""Of a prompt; what comes after them goes where they are."""

HOME_BLOCK = 3
"""The block, from 0, whose digest stands for a prompt's beginning: deep enough to tell system prompts apart."""

LOOK_BACK = 256
"""Requests by which it is told how many begin alike."""

HOMES = 1.5
"""Homes of a beginning that so many requests have as one replica would get of all, if they were spread evenly."""

MUCH = 1.5
MANY = 2
"""Requests of a replica over the mean, times the first and the second more, that are too many for a further one."""

KEEP = 0.75
"""A home that has too much gives a prompt away only to a replica that has less than the mean by this share of it, if
all of the prompt is cached: what is computed again holds up those that it joins, as a wait for the home would not."""

FULL_KV = 0.05
"""Share of free KV below which a replica would have to preempt for another request."""

QUEUE_KNOWN_S = 2.0
"""That the length of a queue is believed. Serve's 10 s are too long: what other ingress replicas had there then ends
unseen, and a replica that nobody asks any more stays as busy as it was thought to be."""


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
        self._recent: deque[bytes] = deque()  # beginnings of the last prompts
        self._counts: Counter[bytes] = Counter()  # of each beginning among them

    def rank(
        self, hashes: Sequence[bytes], session: str | None, replicas: Mapping[str, Busy]
    ) -> tuple[list[str], dict[str, int]]:
        """Replicas, best first, and how many leading blocks of the prompt each is thought to have.

        A replica that should rather be waited for than passed over has only those beside it that may take its place.
        """
        found = self.found(hashes, replicas)
        if not replicas:
            return [], found
        most = max(found.values())
        order = self._order(hashes, session, replicas)
        if session is None:
            order.sort(key=lambda name: 2 * found[name] < most)  # those that have it first, else as all see it
        place = {name: i for i, name in enumerate(order)}
        homes = order[: self._num_homes(hashes, session, len(replicas))]
        mean = sum(busy.requests for busy in replicas.values()) / len(replicas)
        too_many = MUCH * mean + MANY
        waiting = min((replicas[name].requests - replicas[name].slots for name in homes), default=0)
        saved = 1.0 if session is not None else most / max(1, len(hashes))
        few = max((1.0 - KEEP * saved) * mean, waiting / 2)

        def grade(name: str) -> int:
            busy = replicas[name]
            if name in homes or not homes:
                return 2 if busy.requests >= too_many or busy.kv_free < FULL_KV else 0
            return 1 if busy.requests <= few and busy.kv_free >= FULL_KV else 3

        grades = {name: grade(name) for name in replicas}

        def cost(name: str) -> tuple[int, float, float]:
            # Others will have sent its like to a home: if not by load, they all send it to the same one.
            lacks = 0.1 * (2 * found[name] < most) if name in homes else place[name] if homes else 0
            return grades[name], lacks * self._mean_blocks + self._queue(replicas[name]), random.random()

        ranked = sorted(replicas, key=cost)
        if saved:
            ranked = [name for name in ranked if grades[name] < 3]
        return ranked, found

    def learn(self, hashes: Sequence[bytes], session: str | None, replica: str, busy: Busy) -> None:
        """A request was sent to `replica`: its prompt will be in the cache there, and what is used least no more."""
        self._mean_blocks += 0.05 * (max(1, len(hashes)) - self._mean_blocks)
        if hashes:
            self._count(_beginning(hashes))
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

    def _order(self, hashes: Sequence[bytes], session: str | None, replicas: Collection[str]) -> list[str]:
        """Of replicas, for a prompt or a session: the same in all ingress replicas; empty where nothing tells one from
        another."""
        if session is not None:
            last = self._sessions.get(session)
            return sorted(replicas, key=lambda name: (name == last, _weight(session, name)), reverse=True)
        if not hashes:
            return []
        beginning = _beginning(hashes).hex()
        return sorted(replicas, key=lambda name: _weight(beginning, name), reverse=True)

    def _num_homes(self, hashes: Sequence[bytes], session: str | None, num_replicas: int) -> int:
        if session is not None or not hashes:
            return 1
        share = self._counts[_beginning(hashes)] / max(len(self._recent), LOOK_BACK // 8)
        return max(1, min(num_replicas, round(HOMES * share * num_replicas + 0.3)))

    def _count(self, beginning: bytes) -> None:
        self._recent.append(beginning)
        self._counts[beginning] += 1
        if len(self._recent) > LOOK_BACK:
            oldest = self._recent.popleft()
            self._counts[oldest] -= 1
            if not self._counts[oldest]:
                del self._counts[oldest]

    def _queue(self, busy: Busy) -> float:
        """Below its places a replica slows down little as they fill. A request over them waits for one to end, which
        takes as long as half a prompt of the usual length or more."""
        return (0.25 * busy.requests / busy.slots + 0.5 * max(0, busy.requests - busy.slots)) * self._mean_blocks

    def forget(self, gone: Collection[str]) -> None:
        """Replicas that are no more."""
        for name in gone:
            self._known.pop(name, None)


def _beginning(hashes: Sequence[bytes]) -> bytes:
    return hashes[min(HOME_BLOCK, len(hashes) - 1)]


def _weight(key: str, replica: str) -> int:
    return int.from_bytes(blake2b(f"{key}/{replica}".encode(), digest_size=8).digest(), "big")


class AffinityRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types
    """Serve's face of `Affinity`, on handles of the engine deployment.

    Calls without block hashes (control calls) go to the least busy. No FIFOMixin: each request has a choice of its own.
    """

    def initialize_state(self, **_: Any) -> None:
        from app.reports.pool import pool_of

        self._affinity = Affinity()
        self._replica_queue_len_cache = ReplicaQueueLengthCache(
            staleness_timeout_s=QUEUE_KNOWN_S, get_curr_time_s=self._get_curr_time_s
        )
        self._pool = pool_of(self._deployment_id.name)

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
        return [[replica] for replica in self._ranked(candidate_replicas, pending_request)]

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """At once if nothing waits and the best has room: Serve's own way, a task and some turns of the event loop, is
        for when one has to wait."""
        if self._replicas and not is_retry and not self._pending_requests_to_fulfill:
            best = self._ranked(self._replicas_list, pending_request)[0]
            if self._busy(best).requests < best.max_ongoing_requests:
                return best
        return await super()._choose_replica_for_request(pending_request, is_retry=is_retry)

    def _ranked(self, replicas: list[RunningReplica], request: PendingRequest | None) -> list[RunningReplica]:
        """Best first; without those that answer nothing, if there are others."""
        by_name = {replica.replica_id.unique_id: replica for replica in replicas}
        if silent := self._pool.silent:
            by_name = {name: replica for name, replica in by_name.items() if name not in silent} or by_name
        hashes, session = _keys(request)
        ranked, _ = self._affinity.rank(hashes, session, {name: self._busy(r) for name, r in by_name.items()})
        return [by_name[name] for name in ranked]

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
