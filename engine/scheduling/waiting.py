"""The requests that wait, in the order of service.

Tenants share by tokens (`fair_queue`). A tenant's own requests go first come, first served, with a head start
of PRIORITY_S a level of priority: one that has waited long enough is ahead of every newcomer, whatever its priority,
so none starves. Requests of the batch class come after all others: they get what nobody else wants. Those that have an
adapter can be passed over, all at once: while one waits for a slot, the others wait behind it.

What the statistics tell is kept as requests come and go, so that reading it costs nothing.
"""

from collections import deque
from collections.abc import Callable

from engine.request import Request, Status
from engine.scheduling.fair_queue import KINDS, PRIORITY_S, Entry, FairQueue

OUTPUT_WEIGHT = 2.0
"""What a token of output counts against one of a prompt: it takes a step of its own."""

_PLAIN, _ADAPTED = KINDS


class WaitingQueue:
    """num_tokens: to compute of all that wait, if nothing of them is found in the prefix cache."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ordinary: FairQueue[Request] = FairQueue()
        self._batch: FairQueue[Request] = FairQueue()
        self._since: deque[tuple[float, Request]] = deque()  # in the order of coming; most that left stay until met
        self._arrivals = 0
        self._num = 0
        self.num_tokens = 0

    def __len__(self) -> int:
        return self._num

    def arrive(self, request: Request) -> None:
        """Give a new request its place, for life, and let it wait there."""
        self._arrivals += 1
        request.arrival = self._arrivals
        request.rank = self._clock() + PRIORITY_S * request.priority
        self.push(request)

    def push(self, request: Request) -> None:
        request.status = Status.WAITING
        # Who was served already and gave its place up is not charged again.
        cost = len(request.token_ids) if request.num_cached_tokens is None else 0
        kind = _PLAIN if request.adapter is None else _ADAPTED
        self._lane(request).push(request, request.tenant, request.rank, cost, kind)
        self._count(request, 1)
        if len(self._since) > 2 * self._num + 64:  # nobody asks for the longest wait, or one waits very long
            self._since = deque(filter(self._waits_still, self._since))
        request.waits_since = self._clock()
        self._since.append((request.waits_since, request))

    def pop(self, *, adapters: bool = True) -> Entry[Request] | None:
        """Take out the next to be served, charged to its tenant; `put_back` undoes it.

        adapters: also of those that have one.
        """
        kinds = KINDS if adapters else (_PLAIN,)
        entry = self._ordinary.pop_entry(kinds=kinds) or self._batch.pop_entry(kinds=kinds)
        if entry is not None:
            self._count(entry.item, -1)
        return entry

    def put_back(self, entry: Entry[Request]) -> None:
        self._lane(entry.item).put_back(entry)
        self._count(entry.item, 1)

    def remove(self, request: Request) -> None:
        """It has ended before it ran."""
        if self._lane(request).remove(request):
            self._count(request, -1)

    def first_ordinary(self, *, adapters: bool = True) -> Request | None:
        """The next to be served that is not of the batch class. adapters: also of those that have one."""
        return self._ordinary.peek(kinds=KINDS if adapters else (_PLAIN,))

    @property
    def num_tenants(self) -> int:
        """Tenants with requests here that are not of the batch class."""
        return len(self._ordinary.tenants)

    def charge_output(self, request: Request, num_tokens: int) -> None:
        """Count what a request has been given since it was admitted."""
        self._lane(request).charge(request.tenant, OUTPUT_WEIGHT * num_tokens)

    def longest_wait_s(self) -> float:
        """Seconds that the first of those waiting has waited; 0 if none does."""
        since = self._since
        while since and not self._waits_still(since[0]):
            since.popleft()
        return self._clock() - since[0][0] if since else 0.0

    def _waits_still(self, since: tuple[float, Request]) -> bool:
        """Whether the request has waited from then until now."""
        at, request = since
        return at == request.waits_since and request in self._lane(request)

    def _lane(self, request: Request) -> FairQueue[Request]:
        return self._batch if request.is_batch else self._ordinary

    def _count(self, request: Request, sign: int) -> None:
        self._num += sign
        self.num_tokens += sign * len(request.token_ids)
