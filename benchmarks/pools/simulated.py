"""A pool of engine replicas and the trace that it is asked, simulated event by event, for `benchmarks.autoscaling_sim`.

A replica takes prompts one after the other at `PREFILL_RATE` tokens a second and then decodes as many requests as it
has places, each at `DECODE_S` a token. It starts `COLD_START_S` after it is asked for, and when it is to go, it
finishes what it has and takes nothing new. Requests wait before the pool as the ingress holds them: at most 1.25 times
the places of a replica are sent there, to the one with the least. A queue of `MAX_QUEUE` for each replica that the
pool may have is the limit; what comes then is refused and not tried again. The policy is asked every half second, of
what was measured just before.
"""

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from app.autoscaling import Load
from app.ingress import OVERCOMMIT

PREFILL_RATE = 8000.0
DECODE_S = 0.02
PLACES = 32
COLD_START_S = 8.0
TICK_S = 0.5
MAX_QUEUE = 64


@dataclass(frozen=True, slots=True)
class Arrival:
    at: float
    prompt: int
    output: int


def trace(scale: float, seed: int = 0, length_s: float = 1200.0) -> list[Arrival]:
    """Arrivals of about `scale` requests a second at rest: Poisson, with lengths from a log-normal distribution.

    Six bursts of 15 s at ten times the rate, a wave up to three times from 500 to 900 s, silence after `length_s`.
    """
    rng = random.Random(seed)
    bursts = [60.0 + 70.0 * i + rng.uniform(0, 30) for i in range(6)]
    peak = 10.0 * scale
    arrivals: list[Arrival] = []
    at = 0.0
    while True:
        at += rng.expovariate(peak)
        if at >= length_s:
            return arrivals
        rate = scale
        if any(start <= at < start + 15 for start in bursts):
            rate = 10 * scale
        elif 500 <= at < 900:
            rate = scale * (1 + 2 * math.sin(math.pi * (at - 500) / 400))
        if rng.random() < rate / peak:
            prompt = min(8000, int(rng.lognormvariate(6.0, 0.8)))
            output = min(1000, 1 + int(rng.lognormvariate(4.8, 0.6)))
            arrivals.append(Arrival(at, max(1, prompt), output))


@dataclass(slots=True)
class Replica:
    number: int
    up_at: float
    prompts: deque[Arrival] = field(default_factory=deque)
    prompt_tokens: int = 0
    computing: bool = False
    decoding: int = 0
    leaving: bool = False
    busy_s: float = 0.0

    @property
    def outstanding(self) -> int:
        return len(self.prompts) + self.computing + self.decoding


class Simulation:
    """policy: from (now, the simulation) to a count of replicas."""

    def __init__(self, arrivals: list[Arrival], policy: Callable[[float, "Simulation"], int], most: int) -> None:
        self.now = 0.0
        self.queue: deque[Arrival] = deque()
        self.queue_tokens = 0
        self.replicas: dict[int, Replica] = {}
        self.starting: dict[int, float] = {}
        self.target = 0
        self.most = most
        self.ttft: list[float] = []
        self.refused = 0
        self.replica_s = 0.0
        self.largest = 0
        self.turns = 0
        self._policy = policy
        self._arrivals = arrivals
        self._numbers = itertools.count()
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._least: list[tuple[int, int]] = []  # a heap of (outstanding, number); true where both agree
        self._direction = 0

    def run(self) -> None:
        end = self._arrivals[-1].at + 900
        feed = iter(self._arrivals)
        self._feed(feed)
        self._at(0.0, self._tick)
        while self._events and self._events[0][0] <= end:
            self.now, _, action, arguments = heapq.heappop(self._events)
            action(*arguments)

    def _at(self, when: float, action: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._events, (when, next(self._order), action, arguments))

    def _feed(self, feed: Iterator[Arrival]) -> None:
        request = next(feed, None)
        if request is not None:
            self._at(request.at, self._arrive, request, feed)

    def _arrive(self, request: Arrival, feed: Iterator[Arrival]) -> None:
        self._feed(feed)
        if len(self.queue) >= MAX_QUEUE * self.most:
            self.refused += 1
            return
        self.queue.append(request)
        self.queue_tokens += request.prompt
        self._send()

    def _send(self) -> None:
        while self.queue and (replica := self._free_replica()) is not None:
            request = self.queue.popleft()
            self.queue_tokens -= request.prompt
            replica.prompts.append(request)
            replica.prompt_tokens += request.prompt
            self._begin(replica)
            self._offer(replica)

    def _free_replica(self) -> Replica | None:
        while self._least:
            outstanding, number = self._least[0]
            replica = self.replicas.get(number)
            if replica is not None and not replica.leaving and replica.outstanding == outstanding:
                return replica if outstanding < OVERCOMMIT * PLACES else None
            heapq.heappop(self._least)
        return None

    def _offer(self, replica: Replica) -> None:
        heapq.heappush(self._least, (replica.outstanding, replica.number))

    def _begin(self, replica: Replica) -> None:
        """Compute the next prompt, if there is a place for what comes of it."""
        if replica.computing or not replica.prompts or replica.decoding >= PLACES:
            return
        request = replica.prompts.popleft()
        replica.prompt_tokens -= request.prompt
        replica.computing = True
        seconds = request.prompt / PREFILL_RATE
        replica.busy_s += seconds
        self._at(self.now + seconds, self._first_token, replica, request)

    def _first_token(self, replica: Replica, request: Arrival) -> None:
        self.ttft.append(self.now - request.at)
        replica.computing = False
        replica.decoding += 1
        self._at(self.now + request.output * DECODE_S, self._finish, replica)
        self._begin(replica)

    def _finish(self, replica: Replica) -> None:
        replica.decoding -= 1
        self._begin(replica)
        if replica.leaving:
            self._leave(replica)
        else:
            self._offer(replica)
            self._send()

    def _leave(self, replica: Replica) -> None:
        if not replica.outstanding:
            self.replica_s += self.now - replica.up_at
            del self.replicas[replica.number]

    def _tick(self) -> None:
        target = min(self.most, self._policy(self.now, self))
        if target != self.target:
            direction = 1 if target > self.target else -1
            self.turns += direction == -self._direction
            self._direction = direction
        self.target = target
        self.largest = max(self.largest, target)
        staying = [replica for replica in self.replicas.values() if not replica.leaving]
        for _ in range(target - len(staying) - len(self.starting)):
            number = next(self._numbers)
            self.starting[number] = self.now
            self._at(self.now + COLD_START_S, self._up, number)
        surplus = len(staying) + len(self.starting) - target
        for number in sorted(self.starting, reverse=True)[: max(0, surplus)]:
            self.replica_s += self.now - self.starting.pop(number)
            surplus -= 1
        if surplus > 0:
            for replica in sorted(staying, key=lambda r: r.outstanding)[:surplus]:
                replica.leaving = True
                self._leave(replica)
        self._at(self.now + TICK_S, self._tick)

    def _up(self, number: int) -> None:
        if (asked := self.starting.pop(number, None)) is not None:
            replica = self.replicas[number] = Replica(number, asked)
            self._offer(replica)
            self._send()

    def load(self, busy_before: float) -> Load | None:
        up = [replica for replica in self.replicas.values() if not replica.leaving]
        if not up:
            return None
        running = sum(replica.decoding + replica.computing for replica in up)
        waiting = [replica.prompts[0].at for replica in up if replica.prompts]
        oldest = min([*waiting, self.queue[0].at] if self.queue else waiting, default=self.now)
        return Load(
            replicas=len(up),
            slots=len(up) * PLACES,
            running=running,
            waiting=len(self.queue) + sum(len(replica.prompts) for replica in up),
            waiting_tokens=self.queue_tokens + sum(replica.prompt_tokens for replica in up),
            queue_age_s=self.now - oldest,
            prefill_used=busy_before,
            prefill_rate=PREFILL_RATE,
        )

    @property
    def busy_s(self) -> float:
        return sum(replica.busy_s for replica in self.replicas.values())
