"""The requests that wait, in the order of service.

First come, first served, with a head start of PRIORITY_S a level of priority. So a request that has waited long enough
is ahead of every newcomer, whatever its priority: none starves.
"""

import heapq

from engine.request import Request, Status

PRIORITY_S = 60.0
"""Seconds of waiting that one level of priority is worth."""

Entry = tuple[float, int, Request]
"""Rank and arrival, by which they are ordered, and the request."""


class WaitingQueue:
    """Length and truth count the requests that still wait; those ended since stay in the heap until they are met."""

    def __init__(self) -> None:
        self._heap: list[Entry] = []
        self._arrivals = 0
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def arrive(self, request: Request, now: float) -> None:
        """Give a new request its place, for life, and let it wait there."""
        self._arrivals += 1
        request.arrival = self._arrivals
        request.rank = now + PRIORITY_S * request.priority
        self.push(request)

    def push(self, request: Request) -> None:
        request.status = Status.WAITING
        heapq.heappush(self._heap, (request.rank, request.arrival, request))
        self._num += 1

    def left(self) -> None:
        """One of them is about to run, or has ended."""
        self._num -= 1

    def pop(self) -> Entry | None:
        """Take out the first; it counts until `left`, or is put back."""
        while self._heap:
            entry = heapq.heappop(self._heap)
            if entry[2].status is Status.WAITING:
                return entry
        return None

    def put_back(self, entry: Entry) -> None:
        heapq.heappush(self._heap, entry)
