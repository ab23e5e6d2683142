"""The queue in front of the engine: who may submit now, who waits, and who is sent away.

A budget of requests and tokens for each engine replica bounds what is sent there, so that the rest can still go to a
replica that starts now. What waits is shared fairly between tenants (`engine.scheduling.fair_queue`), each tenant's own
by priority and age, and the batch class takes what nobody else wants. When the queue is full, the tenant that has most
of it gives way to those that have less. Standard library only.
"""

import asyncio
import heapq
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from app.pace import Pace
from engine.scheduling.fair_queue import PRIORITY_S, FairQueue

_MAX_RETRY_AFTER_S = 120

_UNKNOWN_PACE_S = 1.0
"""Least time that a submission is taken to need, while none has ended yet."""

_START_S = 10.0
"""And with it the start of the replica that it needs."""


class QueueFullError(Exception):
    """No place in the queue; `retry_after_s` is when, at the present pace, there should be one."""

    def __init__(self, waiting: int, retry_after_s: int) -> None:
        super().__init__(f"The server is busy: {waiting} requests wait already. Try again in {retry_after_s} s.")
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class Budget:
    """What one engine replica is sent at once. batch_requests: with so many there it is idle enough for the batch
    class. spare: beyond that, for tenants that hold fewer and fewer than others, whose places the engine makes free."""

    requests: int
    tokens: float = math.inf
    batch_requests: int | None = None
    spare: int = 0


@dataclass(frozen=True, slots=True)
class Claim:
    """What a submission asks for. tokens: of its prompt, and as many as it may be expected to make."""

    tokens: int = 1
    tenant: str = ""
    priority: int = 0
    is_batch: bool = False


@dataclass(slots=True)
class Together:
    """The tickets of one request. has_begun: whether one of them has been granted."""

    has_begun: bool = False


class Ticket:
    """The right to one submission, granted now or when its turn comes; given back by `release`.

    together: with the others of its request.
    """

    __slots__ = ("_admission", "_granted", "asked_at", "claim", "granted_at", "together")

    def __init__(self, admission: "Admission", claim: Claim, now: float, together: Together) -> None:
        self._admission = admission
        self._granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.claim = claim
        self.together = together
        self.asked_at = now
        self.granted_at: float | None = None

    async def granted(self) -> None:
        """Wait for the turn. Raises `QueueFullError` if the place went to others. A caller that is cancelled here, or
        gets the error, must still `release`."""
        await self._granted

    def release(self) -> None:
        """Give the place back, in the queue or in the engine. Plain call, idempotent."""
        self._admission._release(self)

    def _grant(self, now: float) -> None:
        self.granted_at = now
        self.together.has_begun = True
        if not self._granted.done():
            self._granted.set_result(None)

    def _refuse(self, error: QueueFullError) -> None:
        if not self._granted.done():
            self._granted.set_exception(error)
            self._granted.exception()  # whoever waits gets it; nobody need


class Admission:
    """At most `replicas` budgets outstanding and `max_waiting` submissions in the queue.

    A request of several prompts takes its places in the queue together, or is refused as a whole. It is let in
    while the queue is not full, however many they are, so that no request is too large to be ever served. While
    nothing is outstanding, one is sent whatever its size, and with no replica at all too: that is what starts one.
    """

    def __init__(
        self, budget: Budget, max_waiting: int, replicas: int = 1, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.max_waiting = max_waiting
        self._budget = budget
        self._clock = clock
        self._replicas = replicas
        self._held: dict[Ticket, None] = {}  # in the order of their grants
        self._held_by: Counter[str] = Counter()  # by tenant
        self._held_tokens = 0
        self._ordinary: FairQueue[Ticket] = FairQueue()
        self._batch: FairQueue[Ticket] = FairQueue()
        self._waiting_tokens = 0
        self._pace = Pace()
        self.refused = 0
        self._promised: list[float] = []  # a heap: when those sent away may come back

    @property
    def capacity(self) -> int:
        """Submissions that may be outstanding."""
        return max(1, self._budget.requests * self._replicas)

    @property
    def outstanding(self) -> int:
        return len(self._held)

    @property
    def waiting(self) -> int:
        return len(self._ordinary) + len(self._batch)

    @property
    def waiting_tokens(self) -> int:
        return self._waiting_tokens

    def longest_wait_s(self) -> float:
        """How long the first in the queue has waited; of the batch class too only if it alone waits."""
        lane = self._ordinary or self._batch
        return self._clock() - min((ticket.asked_at for ticket in lane), default=self._clock())

    def resize(self, replicas: int) -> None:
        """Go by another number of engine replicas."""
        self._replicas = replicas
        self._grant_next()

    def check(self, tenant: str = "", is_batch: bool = False) -> None:
        """Raise `QueueFullError` if `reserve` would: before work is done for a request that must go."""
        claim = Claim(tenant=tenant, is_batch=is_batch)
        if self._is_full(claim) and self._who_gives_way(claim) is None:
            raise self._error()

    def reserve(self, claims: Sequence[Claim]) -> list[Ticket]:
        """Places for submissions of one tenant, all or none. Raises `QueueFullError`."""
        first = claims[0]
        if self._is_full(first):
            loser = self._who_gives_way(first)
            if loser is None:
                raise self._error()
            self._leave(loser)
            loser._refuse(self._error())
        now = self._clock()
        together = Together()
        tickets = [Ticket(self, claim, now, together) for claim in claims]
        for ticket in tickets:
            claim = ticket.claim
            self._lane(claim).push(ticket, claim.tenant, now + PRIORITY_S * claim.priority, claim.tokens)
            self._waiting_tokens += claim.tokens
        self._grant_next()
        return tickets

    def _release(self, ticket: Ticket) -> None:
        if ticket in self._held:
            del self._held[ticket]
            self._count(ticket.claim, -1)
            assert ticket.granted_at is not None
            self._pace.note_release(self._clock(), ticket.granted_at)
        else:
            self._leave(ticket)
        self._grant_next()  # where one left the queue, too: there may be room for those behind it

    def _lane(self, claim: Claim) -> FairQueue[Ticket]:
        return self._batch if claim.is_batch else self._ordinary

    def _leave(self, ticket: Ticket) -> None:
        if self._lane(ticket.claim).remove(ticket):
            self._waiting_tokens -= ticket.claim.tokens

    def _grant_next(self) -> None:
        while (ticket := self._next_to_grant()) is not None:
            self._lane(ticket.claim).pop(ticket.claim.tenant)
            self._waiting_tokens -= ticket.claim.tokens
            self._held[ticket] = None
            self._count(ticket.claim, 1)
            ticket._grant(self._clock())
        self._pace.note_full(self._clock(), self.waiting > 0 or self.outstanding >= self.capacity)

    def _next_to_grant(self) -> Ticket | None:
        """The first in the queue if there is room for it; else one for which there are spare places."""
        ticket = self._ordinary.peek() or self._batch.peek()
        if ticket is None or self._has_room(ticket.claim):
            return ticket
        tenant = min(self._ordinary.tenants, key=self._held_by.__getitem__, default=None)
        return None if tenant is None or not self._has_spare_room(tenant) else self._ordinary.peek(tenant)

    def _count(self, claim: Claim, sign: int) -> None:
        self._held_tokens += sign * claim.tokens
        self._held_by[claim.tenant] += sign
        if not self._held_by[claim.tenant]:
            del self._held_by[claim.tenant]

    def _has_room(self, claim: Claim) -> bool:
        if not self._held:
            return True
        requests = self._budget.requests
        if claim.is_batch and self._budget.batch_requests is not None:
            requests = self._budget.batch_requests
        return (
            len(self._held) < requests * self._replicas
            and self._held_tokens + claim.tokens <= self._budget.tokens * self._replicas
        )

    def _has_spare_room(self, tenant: str) -> bool:
        """Whether a tenant has so little of what is outstanding that it may have more than there is room for."""
        spare, mine = self._budget.spare * self._replicas, self._held_by[tenant]
        return (
            mine < spare
            and len(self._held) < self.capacity + spare
            and max(self._held_by.values(), default=0) > mine + 1
        )

    def _is_full(self, claim: Claim) -> bool:
        """Whether a submission would have to wait where no place is left."""
        if self.waiting < self.max_waiting:
            return False
        return bool(self.waiting) or not self._has_room(claim)

    def _who_gives_way(self, claim: Claim) -> Ticket | None:
        """Whose place a newcomer may have: the batch class's, or the last of a tenant that has more than it would. One
        that belongs to a request under way only if there is no other: all that it has had is lost with it."""
        if not claim.is_batch and (tenant := self._batch.longest()) is not None:
            return self._batch.last_of(tenant, spare=_has_begun)
        lane = self._lane(claim)
        tenant = lane.longest()
        if tenant is None or lane.num_waiting(tenant) <= lane.num_waiting(claim.tenant) + 1:
            return None
        return lane.last_of(tenant, spare=_has_begun)

    def _error(self) -> QueueFullError:
        """Each that is sent away is promised a place of its own, so that they do not all come back at once."""
        self.refused += 1
        now = self._clock()
        while self._promised and self._promised[0] <= now:
            heapq.heappop(self._promised)
        places = self.waiting - self.max_waiting + 1 + len(self._promised)
        seconds = min(_MAX_RETRY_AFTER_S, max(1, math.ceil(self._interval_s(now) * places)))
        heapq.heappush(self._promised, now + seconds)
        return QueueFullError(self.waiting, seconds)

    def _interval_s(self, now: float) -> float:
        """Seconds between two releases at the pace of the last ones.

        With no pace yet, all places become free in the time that submissions have taken; where none has ended, the age
        of the oldest is the least that one is known to take. With no replica, a pace of before says nothing.
        """
        if self._replicas and (interval := self._pace.interval_s(now)) is not None:
            return interval
        oldest = next(iter(self._held), None)
        age = now - oldest.granted_at if oldest is not None and oldest.granted_at is not None else 0.0
        took = self._pace.took_s()
        least = _UNKNOWN_PACE_S if self._replicas else _START_S
        return max(age if took is None else took, least) / (self._budget.requests * max(1, self._replicas))


def _has_begun(ticket: Ticket) -> bool:
    return ticket.together.has_begun
