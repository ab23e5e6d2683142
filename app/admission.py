"""The queue in front of the engine: who may submit now, who waits, and who is sent away. Standard library only."""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable

_RATE_WINDOW = 64
"""Releases that the estimate of the pace looks back on."""

_MAX_RETRY_AFTER_S = 120


class QueueFullError(Exception):
    """No place in the queue; `retry_after_s` is when, at the present pace, there should be one."""

    def __init__(self, waiting: int, retry_after_s: int) -> None:
        super().__init__(f"The server is busy: {waiting} requests wait already. Try again in {retry_after_s} s.")
        self.retry_after_s = retry_after_s


class Ticket:
    """The right to one submission, granted now or when its turn comes; given back by `release`."""

    __slots__ = ("_admission", "_granted", "granted_at")

    def __init__(self, admission: "Admission") -> None:
        self._admission = admission
        self._granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.granted_at: float | None = None

    async def granted(self) -> None:
        """Wait for the turn. A caller that is cancelled here must still `release`."""
        await self._granted

    def release(self) -> None:
        """Give the place back, in the queue or in the engine. Plain call, idempotent."""
        self._admission._release(self)

    def _grant(self, now: float) -> None:
        self.granted_at = now
        if not self._granted.done():
            self._granted.set_result(None)


class Admission:
    """At most `capacity` submissions outstanding and `max_waiting` in the queue, first come first served.

    A request of several prompts takes its places in the queue together, or is refused as a whole. It is let in
    while the queue is not full, however many they are, so that no request is too large to be ever served.
    """

    def __init__(self, capacity: int, max_waiting: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.capacity = capacity
        self.max_waiting = max_waiting
        self._clock = clock
        self._held: dict[Ticket, None] = {}  # in the order of their grants
        self._waiting: dict[Ticket, None] = {}
        self._released_at: deque[float] = deque(maxlen=_RATE_WINDOW)

    @property
    def outstanding(self) -> int:
        return len(self._held)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def check(self) -> None:
        """Raise `QueueFullError` if `reserve` would: before work is done for a request that must go."""
        if len(self._held) >= self.capacity and len(self._waiting) >= self.max_waiting:
            raise QueueFullError(len(self._waiting), self._retry_after_s())

    def reserve(self, count: int = 1) -> list[Ticket]:
        """Places for `count` submissions, all or none. Raises `QueueFullError`."""
        self.check()
        tickets = [Ticket(self) for _ in range(count)]
        self._waiting.update(dict.fromkeys(tickets))
        self._grant_next()
        return tickets

    def _release(self, ticket: Ticket) -> None:
        if ticket in self._held:
            del self._held[ticket]
            self._released_at.append(self._clock())
            self._grant_next()
        else:
            self._waiting.pop(ticket, None)

    def _grant_next(self) -> None:
        while self._waiting and len(self._held) < self.capacity:
            ticket = next(iter(self._waiting))
            del self._waiting[ticket]
            self._held[ticket] = None
            ticket._grant(self._clock())

    def _retry_after_s(self) -> int:
        """Seconds until the queue has a place, at the pace of the last releases.

        With no pace yet, the age of the oldest submission is the least that one is known to take.
        """
        now = self._clock()
        excess = len(self._waiting) - self.max_waiting + 1
        if len(self._released_at) >= 2:
            # Up to now, not up to the last release: when nothing is released any more, the pace falls.
            interval = (now - self._released_at[0]) / len(self._released_at)
        else:
            oldest = next(iter(self._held), None)
            age = now - oldest.granted_at if oldest is not None and oldest.granted_at is not None else 0.0
            interval = age / self.capacity
        return min(_MAX_RETRY_AFTER_S, max(1, math.ceil(interval * excess)))
