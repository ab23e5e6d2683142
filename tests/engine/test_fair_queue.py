"""The queue that tenants share: fairness by cost, order within a tenant, memory of none."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scheduling.fair_queue import FairQueue


def drain(queue: FairQueue[str]) -> list[str]:
    out = []
    while (item := queue.pop()) is not None:
        out.append(item)
    return out


def test_one_tenant_is_served_by_order_and_then_as_it_came() -> None:
    queue: FairQueue[str] = FairQueue()
    for name, order in (("late", 2.0), ("first", 1.0), ("second", 1.0), ("urgent", 0.0)):
        queue.push(name, order=order)
    assert drain(queue) == ["urgent", "first", "second", "late"]


def test_a_flood_delays_a_newcomer_by_one_entry() -> None:
    queue: FairQueue[str] = FairQueue()
    for i in range(100):
        queue.push(f"flood{i}", "a", order=i, cost=50)
    for _ in range(10):
        queue.pop()
    queue.push("new", "b", order=1000, cost=50)
    assert "new" in [queue.pop(), queue.pop()]


def test_tenants_share_by_cost_and_not_by_number() -> None:
    queue: FairQueue[str] = FairQueue()
    for i in range(1000):
        queue.push(f"s{i}", "small", cost=10)
        queue.push(f"l{i}", "large", cost=100)
    served = Counter(item[0] for item in (queue.pop() or "" for _ in range(550)))
    assert 480 <= served["s"] <= 520
    assert 45 <= served["l"] <= 55


def test_a_pause_saves_up_no_claim() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push("b", "b", cost=1)
    queue.pop()
    for i in range(100):  # b rests
        queue.push(f"a{i}", "a", cost=10)
        queue.pop()
    for i in range(10):
        queue.push(f"a'{i}", "a", cost=10)
        queue.push(f"b'{i}", "b", cost=10)
    first = [queue.pop() for _ in range(8)]
    assert 3 <= sum(1 for item in first if item is not None and item[0] == "a") <= 5


def test_output_counts_when_it_is_charged() -> None:
    queue: FairQueue[str] = FairQueue()
    for i in range(4):
        queue.push(f"a{i}", "a", cost=10)
        queue.push(f"b{i}", "b", cost=10)
    queue.charge("a", 25)
    assert [item[0] for item in drain(queue)] == list("bbbabaaa")


def test_put_back_restores_place_and_charge() -> None:
    queue: FairQueue[str] = FairQueue()
    for i in range(3):
        queue.push(f"a{i}", "a", order=i, cost=10)
        queue.push(f"b{i}", "b", order=i, cost=10)
    entries = [queue.pop_entry() for _ in range(3)]
    for entry in entries:
        assert entry is not None
        queue.put_back(entry)
    assert drain(queue) == ["a0", "b0", "a1", "b1", "a2", "b2"]


def test_the_tenant_with_the_most_and_its_last() -> None:
    queue: FairQueue[str] = FairQueue()
    assert queue.longest() is None
    for i in range(3):
        queue.push(f"a{i}", "a", order=i)
    queue.push("b0", "b")
    assert (queue.longest(), queue.last_of("a"), queue.num_waiting("a")) == ("a", "a2", 3)
    assert queue.remove("a2")
    assert not queue.remove("a2")
    assert queue.last_of("a") == "a1"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["push", "pop", "remove", "put_back"]),
            st.integers(0, 4),
            st.integers(-3, 3),
            st.integers(0, 50),
        ),
        max_size=120,
    )
)
def test_nothing_is_lost_or_served_twice(steps: list[tuple[str, int, int, int]]) -> None:
    queue: FairQueue[int] = FairQueue()
    waiting: dict[int, tuple[str, int]] = {}
    last = None
    for n, (action, tenant, order, cost) in enumerate(steps):
        if action == "push":
            queue.push(n, str(tenant), order=order, cost=cost)
            waiting[n] = (str(tenant), order)
        elif action == "pop":
            last = queue.pop_entry()
            assert (last is None) == (not waiting)
            if last is not None:
                name, rank = waiting.pop(last.item)
                assert all(rank <= other for whose, other in waiting.values() if whose == name)
        elif action == "remove" and waiting:
            item = next(iter(waiting))
            del waiting[item]
            assert queue.remove(item)
        elif action == "put_back" and last is not None:
            queue.put_back(last)
            waiting[last.item] = (last.tenant.name, last.order[0])
            last = None
        assert len(queue) == len(waiting)
        assert queue.peek() is None or queue.peek() in waiting
    assert sorted(iter(lambda: queue.pop(), None)) == sorted(waiting)


def test_entries_of_one_kind_are_passed_over_and_keep_their_place_and_charge() -> None:
    queue: FairQueue[str] = FairQueue()
    for i in range(3):
        queue.push(f"a{i}", "a", order=i, cost=10, kind=1)
        queue.push(f"b{i}", "b", order=i, cost=10, kind=i % 2)
    queue.push("a3", "a", order=3, cost=10)
    assert queue.peek() == "a0"
    assert queue.peek(kinds=(0,)) == "a3"
    passed = queue.pop_entry()
    assert passed is not None
    queue.put_back(passed)
    taken = [queue.pop_entry(kinds=(0,)) for _ in range(4)]
    assert [entry and entry.item for entry in taken] == ["a3", "b0", "b2", None]
    assert drain(queue) == ["a0", "a1", "b1", "a2"], "a has had 10 and b 20"
