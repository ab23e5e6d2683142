"""A queue that several tenants share fairly by what their entries cost, so that one tenant's flood starves no other.

The method is the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024): each
tenant has a counter of the service it has had, and the waiting tenant with the least is served next. A tenant that
comes back from a pause is lifted to the least counter of those that wait, so that an idle time saves up no claim.
Entries of one tenant are served by their own order. An entry is of one of two kinds, so that those of the second can be
passed over, however many they are.

Standard library only; every operation takes O(log n).
"""

import heapq
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import Generic, TypeAlias, TypeVar

PRIORITY_S = 60.0
"""Seconds of waiting that one level of priority is worth, for those whose order is one of priority and age."""

MAX_IDLE_TENANTS = 4096
"""Tenants with nothing in the queue whose counters are remembered."""

KINDS = (0, 1)

T = TypeVar("T", bound=Hashable)


class Entry(Generic[T]):
    """One item in the queue, or just taken out of it."""

    __slots__ = ("cost", "item", "kind", "order", "tenant", "waits")

    def __init__(self, item: T, tenant: "_Tenant[T]", order: tuple[float, int], cost: float, kind: int) -> None:
        self.item = item
        self.tenant = tenant
        self.order = order
        self.cost = cost
        self.kind = kind
        self.waits = True


_Place: TypeAlias = tuple[tuple[float, int], Entry[T]]


class _Tenant(Generic[T]):
    """entries, waiting: by kind: a heap in which removed ones stay until met, and how many of it wait."""

    __slots__ = ("counter", "entries", "name", "waiting")

    def __init__(self, name: str) -> None:
        self.name = name
        self.counter = 0.0
        self.entries: tuple[list[_Place[T]], list[_Place[T]]] = ([], [])
        self.waiting = [0, 0]

    def first(self, kinds: Sequence[int]) -> Entry[T] | None:
        """The next of those that wait."""
        places: list[_Place[T]] = []
        for kind in kinds:
            if self.waiting[kind]:
                entries = self.entries[kind]
                while not entries[0][1].waits:
                    heapq.heappop(entries)
                places.append(entries[0])
        return min(places)[1] if places else None


class FairQueue(Generic[T]):
    """Items are told apart by hash and equality, and each may wait once."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant[T]] = {}
        self._entries: dict[T, Entry[T]] = {}
        # By kind, a heap of (counter, name); true for a tenant with that counter of which one of the kind waits.
        self._least: tuple[list[tuple[float, str]], list[tuple[float, str]]] = ([], [])
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

    def push(self, item: T, tenant: str = "", order: float = 0.0, cost: float = 1.0, kind: int = 0) -> None:
        """order: lower is served earlier among the tenant's own; equal ones as they came. cost: charged by `pop`."""
        if item in self._entries:
            raise ValueError(f"{item!r} waits already")
        self._pushed += 1
        state = self._tenants.get(tenant)
        if state is None:
            self._forget_idle()
            state = self._tenants[tenant] = _Tenant(tenant)
        if tenant not in self._waiting:
            least = self._next_tenant(KINDS)
            state.counter = max(state.counter, self._floor if least is None else least.counter)
        self._enter(Entry(item, state, (order, self._pushed), cost, kind))
        if state.waiting[kind] == 1:
            heapq.heappush(self._least[kind], (state.counter, tenant))

    def put_back(self, entry: Entry[T]) -> None:
        """Undo the `pop_entry` that gave `entry`."""
        tenant = self._tenants.setdefault(entry.tenant.name, entry.tenant)
        tenant.counter -= entry.cost
        self._enter(Entry(entry.item, tenant, entry.order, entry.cost, entry.kind))
        self._place(tenant)

    def pop(self, tenant: str | None = None) -> T | None:
        """The next item, its cost charged to its tenant; None when nothing waits. tenant: of this one alone."""
        entry = self.pop_entry(tenant)
        return None if entry is None else entry.item

    def pop_entry(self, tenant: str | None = None, kinds: Sequence[int] = KINDS) -> Entry[T] | None:
        """As `pop`, with what `put_back` needs. kinds: of these alone."""
        found = self._next_tenant(kinds) if tenant is None else self._waiting_tenant(tenant)
        entry = None if found is None else found.first(kinds)
        if found is None or entry is None:
            return None
        heapq.heappop(found.entries[entry.kind])
        self._leave(entry)
        self.charge(found.name, entry.cost)
        self._floor = max(self._floor, found.counter)
        return entry

    def peek(self, tenant: str | None = None, kinds: Sequence[int] = KINDS) -> T | None:
        """What `pop_entry` would give."""
        found = self._next_tenant(kinds) if tenant is None else self._waiting_tenant(tenant)
        entry = None if found is None else found.first(kinds)
        return None if entry is None else entry.item

    def remove(self, item: T) -> bool:
        """Take an item out, uncharged; False if it does not wait."""
        entry = self._entries.get(item)
        if entry is None:
            return False
        self._leave(entry)
        entries = entry.tenant.entries[entry.kind]
        if len(entries) > 32 and len(entries) > 2 * entry.tenant.waiting[entry.kind]:
            entries[:] = [place for place in entries if place[1].waits]
            heapq.heapify(entries)
        return True

    def charge(self, tenant: str, cost: float) -> None:
        """Count service that a tenant has had, beyond what `pop` has charged."""
        state = self._tenants.get(tenant)
        if state is not None and cost:
            state.counter += cost
            self._place(state)

    @property
    def tenants(self) -> Collection[str]:
        """Those with something in the queue."""
        return self._waiting

    def num_waiting(self, tenant: str) -> int:
        state = self._tenants.get(tenant)
        return 0 if state is None else sum(state.waiting)

    def longest(self) -> str | None:
        """The tenant with the most entries; None when nothing waits. O(tenants)."""
        return max(self._waiting, key=self.num_waiting, default=None)

    def last_of(self, tenant: str, spare: Callable[[T], bool] = lambda item: False) -> T | None:
        """The entry of a tenant that would be served last, of those that `spare` does not name if there are any.
        O(its entries)."""
        state = self._waiting_tenant(tenant)
        if state is None:
            return None
        places = (place for entries in state.entries for place in entries if place[1].waits)
        return max(places, key=lambda place: (not spare(place[1].item), place))[1].item

    def _enter(self, entry: Entry[T]) -> None:
        tenant, kind = entry.tenant, entry.kind
        if not tenant.waiting[kind]:
            tenant.entries[kind].clear()
        heapq.heappush(tenant.entries[kind], (entry.order, entry))
        tenant.waiting[kind] += 1
        self._entries[entry.item] = entry
        self._waiting[tenant.name] = None

    def _leave(self, entry: Entry[T]) -> None:
        del self._entries[entry.item]
        entry.waits = False
        tenant = entry.tenant
        tenant.waiting[entry.kind] -= 1
        if not any(tenant.waiting):
            del self._waiting[tenant.name]

    def _place(self, tenant: _Tenant[T]) -> None:
        """Its counter has changed."""
        for kind in KINDS:
            if tenant.waiting[kind]:
                heapq.heappush(self._least[kind], (tenant.counter, tenant.name))

    def _waiting_tenant(self, name: str) -> _Tenant[T] | None:
        return self._tenants[name] if name in self._waiting else None

    def _next_tenant(self, kinds: Sequence[int]) -> _Tenant[T] | None:
        places = [place for kind in kinds if (place := self._least_of(kind)) is not None]
        return self._tenants[min(places)[1]] if places else None

    def _least_of(self, kind: int) -> tuple[float, str] | None:
        heap = self._least[kind]
        while heap:
            counter, name = heap[0]
            tenant = self._tenants.get(name)
            if tenant is not None and tenant.waiting[kind] and tenant.counter == counter:
                return heap[0]
            heapq.heappop(heap)
        return None

    def _forget_idle(self) -> None:
        """Keep the memory of tenants bounded: those go first whose claim is the same when they come back."""
        if len(self._tenants) < MAX_IDLE_TENANTS:
            return
        idle = sorted((t.counter, t.name) for t in self._tenants.values() if t.name not in self._waiting)
        for _, name in idle[: len(idle) // 2]:
            del self._tenants[name]
