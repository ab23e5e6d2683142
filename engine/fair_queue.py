"""A queue that several tenants share fairly by what their entries cost, so that one tenant's flood starves no other.

The method is the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024): each
tenant has a counter of the service it has had, and the waiting tenant with the least is served next. A tenant that
comes back from a pause is lifted to the least counter of those that wait, so that an idle time saves up no claim.
Entries of one tenant are served by their own order.

Standard library only; every operation takes O(log n).
"""

import heapq
from collections.abc import Collection, Hashable, Iterator
from typing import Generic, TypeVar

PRIORITY_S = 60.0
"""Seconds of waiting that one level of priority is worth, for those whose order is one of priority and age."""

MAX_IDLE_TENANTS = 4096
"""Tenants with nothing in the queue whose counters are remembered."""

T = TypeVar("T", bound=Hashable)


class Entry(Generic[T]):
    """One item in the queue, or just taken out of it."""

    __slots__ = ("cost", "item", "order", "tenant", "waits")

    def __init__(self, item: T, tenant: "_Tenant[T]", order: tuple[float, int], cost: float) -> None:
        self.item = item
        self.tenant = tenant
        self.order = order
        self.cost = cost
        self.waits = True


class _Tenant(Generic[T]):
    __slots__ = ("counter", "entries", "name", "num_waiting")

    def __init__(self, name: str) -> None:
        self.name = name
        self.counter = 0.0
        self.entries: list[tuple[tuple[float, int], Entry[T]]] = []  # a heap; removed ones stay until met
        self.num_waiting = 0


class FairQueue(Generic[T]):
    """Items are told apart by hash and equality, and each may wait once."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant[T]] = {}
        self._entries: dict[T, Entry[T]] = {}
        self._least: list[tuple[float, str]] = []  # a heap of (counter, name); true for a tenant that waits with it
        self._floor = 0.0  # counter of the tenant that was served last
        self._pushed = 0
        self._waiting: dict[str, None] = {}  # tenants with entries that wait

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, item: T) -> bool:
        return item in self._entries

    def __iter__(self) -> Iterator[T]:
        """In no order."""
        return iter(self._entries)

    def push(self, item: T, tenant: str = "", order: float = 0.0, cost: float = 1.0) -> None:
        """order: lower is served earlier among the tenant's own; equal ones as they came. cost: charged by `pop`."""
        self._pushed += 1
        self._push(item, tenant, (order, self._pushed), cost, lift=True)

    def put_back(self, entry: "Entry[T]") -> None:
        """Undo the `pop_entry` that gave `entry`."""
        entry.tenant.counter -= entry.cost
        self._push(entry.item, entry.tenant.name, entry.order, entry.cost, lift=False)

    def pop(self, tenant: str | None = None) -> T | None:
        """The next item, its cost charged to its tenant; None when nothing waits. tenant: of this one alone."""
        entry = self.pop_entry(tenant)
        return None if entry is None else entry.item

    def pop_entry(self, tenant: str | None = None) -> "Entry[T] | None":
        """As `pop`, with what `put_back` needs."""
        found = self._next_tenant(tenant)
        if found is None:
            return None
        while True:
            _, entry = heapq.heappop(found.entries)
            if entry.waits:
                break
        self._leave(entry)
        self.charge(found.name, entry.cost)
        self._floor = max(self._floor, found.counter)
        return entry

    def peek(self, tenant: str | None = None) -> T | None:
        """What `pop` would give."""
        found = self._next_tenant(tenant)
        if found is None:
            return None
        while not found.entries[0][1].waits:
            heapq.heappop(found.entries)
        return found.entries[0][1].item

    def remove(self, item: T) -> bool:
        """Take an item out, uncharged; False if it does not wait."""
        entry = self._entries.get(item)
        if entry is None:
            return False
        self._leave(entry)
        tenant = entry.tenant
        if len(tenant.entries) > 32 and len(tenant.entries) > 2 * tenant.num_waiting:
            tenant.entries = [pair for pair in tenant.entries if pair[1].waits]
            heapq.heapify(tenant.entries)
        return True

    def charge(self, tenant: str, cost: float) -> None:
        """Count service that a tenant has had, beyond what `pop` has charged."""
        state = self._tenants.get(tenant)
        if state is not None and cost:
            state.counter += cost
            if state.num_waiting:
                heapq.heappush(self._least, (state.counter, tenant))

    @property
    def tenants(self) -> Collection[str]:
        """Those with something in the queue."""
        return self._waiting

    def num_waiting(self, tenant: str) -> int:
        state = self._tenants.get(tenant)
        return 0 if state is None else state.num_waiting

    def longest(self) -> str | None:
        """The tenant with the most entries; None when nothing waits. O(tenants)."""
        return max(self._waiting, key=self.num_waiting, default=None)

    def last_of(self, tenant: str) -> T | None:
        """The entry of a tenant that would be served last. O(its entries)."""
        state = self._tenants.get(tenant)
        waiting = [pair for pair in state.entries if pair[1].waits] if state is not None else []
        return max(waiting)[1].item if waiting else None

    def _push(self, item: T, name: str, order: tuple[float, int], cost: float, lift: bool) -> None:
        if item in self._entries:
            raise ValueError(f"{item!r} waits already")
        tenant = self._tenants.get(name)
        if tenant is None:
            self._forget_idle()
            tenant = self._tenants[name] = _Tenant(name)
        if not tenant.num_waiting:
            if lift:
                waiting = self._next_tenant()
                tenant.counter = max(tenant.counter, self._floor if waiting is None else waiting.counter)
            tenant.entries.clear()
        entry = Entry(item, tenant, order, cost)
        self._entries[item] = entry
        heapq.heappush(tenant.entries, (order, entry))
        tenant.num_waiting += 1
        self._waiting[name] = None
        if tenant.num_waiting == 1 or not lift:
            heapq.heappush(self._least, (tenant.counter, name))

    def _leave(self, entry: "Entry[T]") -> None:
        del self._entries[entry.item]
        entry.waits = False
        entry.tenant.num_waiting -= 1
        if not entry.tenant.num_waiting:
            del self._waiting[entry.tenant.name]

    def _next_tenant(self, name: str | None = None) -> "_Tenant[T] | None":
        if name is not None:
            return self._tenants[name] if name in self._waiting else None
        while self._least:
            counter, name = self._least[0]
            tenant = self._tenants.get(name)
            if tenant is not None and tenant.num_waiting and tenant.counter == counter:
                return tenant
            heapq.heappop(self._least)
        return None

    def _forget_idle(self) -> None:
        """Keep the memory of tenants bounded: those go first whose claim is the same when they come back."""
        if len(self._tenants) < MAX_IDLE_TENANTS:
            return
        idle = sorted((t.counter, t.name) for t in self._tenants.values() if not t.num_waiting)
        for _, name in idle[: len(idle) // 2]:
            del self._tenants[name]
