"""The admission queue alone, with a clock of its own."""

import asyncio
import math
import random

import pytest

from app.admission import Admission, Budget, Claim, QueueFullError, Ticket


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


async def test_first_come_first_served() -> None:
    admission = Admission(Budget(1), max_waiting=10)
    order: list[int] = []

    async def work(name: int) -> None:
        (ticket,) = admission.reserve([Claim()])
        try:
            await ticket.granted()
            order.append(name)
            await asyncio.sleep(0)
        finally:
            ticket.release()

    await asyncio.gather(*(work(name) for name in range(6)))
    assert order == list(range(6))
    assert (admission.outstanding, admission.waiting) == (0, 0)


async def test_capacity_then_queue_then_refusal() -> None:
    admission = Admission(Budget(2), max_waiting=1)
    tickets = [admission.reserve([Claim()])[0] for _ in range(3)]
    assert (admission.outstanding, admission.waiting) == (2, 1)
    with pytest.raises(QueueFullError):
        admission.check()
    with pytest.raises(QueueFullError):
        admission.reserve([Claim()])
    tickets[0].release()
    await asyncio.wait_for(tickets[2].granted(), 1)
    admission.check()
    assert (admission.outstanding, admission.waiting) == (2, 0)


async def test_release_is_idempotent_and_good_while_waiting() -> None:
    admission = Admission(Budget(1), max_waiting=2)
    (first,), (second,), (third,) = (
        admission.reserve([Claim()]),
        admission.reserve([Claim()]),
        admission.reserve([Claim()]),
    )
    second.release()
    second.release()
    first.release()
    first.release()
    await asyncio.wait_for(third.granted(), 1)
    assert (admission.outstanding, admission.waiting) == (1, 0)


async def test_a_waiter_that_was_cancelled_loses_no_place_of_others() -> None:
    admission = Admission(Budget(1), max_waiting=5)
    (first,), (second,), (third,) = (
        admission.reserve([Claim()]),
        admission.reserve([Claim()]),
        admission.reserve([Claim()]),
    )
    waiting = asyncio.ensure_future(second.granted())
    await asyncio.sleep(0)
    waiting.cancel()
    first.release()  # grants the second, whose waiter has just gone
    second.release()
    await asyncio.wait_for(third.granted(), 1)


async def test_many_prompts_enter_whole_or_not_at_all() -> None:
    admission = Admission(Budget(2), max_waiting=1)
    tickets = admission.reserve([Claim()] * 5)
    assert (admission.outstanding, admission.waiting) == (2, 3)
    with pytest.raises(QueueFullError):
        admission.reserve([Claim()])
    for ticket in tickets:
        ticket.release()
    assert (admission.outstanding, admission.waiting) == (0, 0)


async def test_no_queue_still_uses_the_capacity() -> None:
    admission = Admission(Budget(1), max_waiting=0)
    admission.reserve([Claim()])
    with pytest.raises(QueueFullError):
        admission.reserve([Claim()])


async def test_retry_after_follows_the_pace_of_releases() -> None:
    clock = Clock()
    admission = Admission(Budget(1), max_waiting=1, clock=clock)
    for _ in range(10):
        (ticket,) = admission.reserve([Claim()])
        clock.now += 4.0
        ticket.release()
    admission.reserve([Claim()] * 2)
    with pytest.raises(QueueFullError) as caught:
        admission.check()
    assert 4 <= caught.value.retry_after_s <= 5
    assert "4 s" in str(caught.value)
    clock.now += 100.0  # nothing is released any more: the estimate rises
    with pytest.raises(QueueFullError) as caught:
        admission.check()
    assert caught.value.retry_after_s > 10


@pytest.mark.parametrize("asks_little", [False, True])
async def test_retry_after_in_a_burst_does_not_count_the_quiet_time_before_it(asks_little: bool) -> None:
    clock = Clock()
    admission = Admission(Budget(4), max_waiting=4, clock=clock)
    for _ in range(20):  # bursts of two a second, or one now and then
        tickets = admission.reserve([Claim()] * (1 if asks_little else 8))
        for ticket in tickets:
            clock.now += 0.5
            ticket.release()
        clock.now += 1000.0
    admission.reserve([Claim()] * 8)
    clock.now += 0.1
    with pytest.raises(QueueFullError) as caught:
        admission.check()
    assert caught.value.retry_after_s == 1


async def test_retry_after_with_no_replica_counts_its_start_and_all_of_its_places() -> None:
    clock = Clock()
    admission = Admission(Budget(requests=20), max_waiting=1, replicas=0, clock=clock)
    assert granted(admission.reserve([Claim(), Claim()])) == 1
    told = []
    for _ in range(40):
        with pytest.raises(QueueFullError) as caught:
            admission.check()
        told.append(caught.value.retry_after_s)
    assert told[0] == 1
    assert told[-1] == 20, "a replica that starts takes twenty of them in ten seconds"


async def test_retry_after_before_the_first_release_is_at_least_what_the_oldest_has_taken() -> None:
    clock = Clock()
    admission = Admission(Budget(2), max_waiting=0, clock=clock)
    admission.reserve([Claim()] * 2)
    clock.now += 10.0
    with pytest.raises(QueueFullError) as caught:
        admission.check()
    assert caught.value.retry_after_s == 5


async def test_before_anything_has_ended_those_sent_away_are_told_times_apart() -> None:
    clock = Clock()
    admission = Admission(Budget(2), max_waiting=0, clock=clock)
    admission.reserve([Claim()] * 2)
    told = []
    for _ in range(6):
        with pytest.raises(QueueFullError) as caught:
            admission.check()
        told.append(caught.value.retry_after_s)
    assert told == [1, 1, 2, 2, 3, 3]
    clock.now += 10
    with pytest.raises(QueueFullError) as caught:
        admission.check()
    assert caught.value.retry_after_s == 5, "those who were told before had their turn"


async def test_who_had_been_told_a_long_time_leaves_nobody_counted_who_came_after_and_has_had_his_turn() -> None:
    clock = Clock()
    admission = Admission(Budget(1), max_waiting=0, clock=clock)
    (slow,) = admission.reserve([Claim()])
    clock.now += 100.0
    with pytest.raises(QueueFullError) as caught:
        admission.check()
    assert caught.value.retry_after_s == 100
    slow.release()
    for _ in range(64):  # from now on it is quick
        (ticket,) = admission.reserve([Claim()])
        clock.now += 0.1
        ticket.release()
    admission.reserve([Claim()])
    for _ in range(50):
        with pytest.raises(QueueFullError):
            admission.check()
    clock.now += 10.0
    with pytest.raises(QueueFullError) as caught:
        admission.check()
    assert caught.value.retry_after_s <= 2


async def test_who_comes_back_when_told_finds_a_place() -> None:
    """A server that ends one submission every 2 s, and 30 clients that keep to what they are told."""
    clock = Clock()
    admission = Admission(Budget(4), max_waiting=4, clock=clock)
    back = [(clock.now, n) for n in range(30)]
    tries = dict.fromkeys(range(30), 0)
    held: list[Ticket] = []
    while back or held:
        at, client = min(back, default=(float("inf"), -1))
        if clock.now < at and held:
            clock.now += 2.0
            done = next(ticket for ticket in held if ticket.granted_at is not None)
            held.remove(done)
            done.release()
            continue
        clock.now = max(clock.now, at)
        back.remove((at, client))
        tries[client] += 1
        try:
            held += admission.reserve([Claim()])
        except QueueFullError as error:
            back.append((clock.now + error.retry_after_s, client))
    assert max(tries.values()) <= 4, "without a pace the first times are guesses"
    assert sum(tries.values()) <= 3 * len(tries)


async def test_a_budget_counts_tokens_and_lets_the_largest_in_when_nothing_else_runs() -> None:
    admission = Admission(Budget(10, tokens=100), max_waiting=10)
    (small,), (large,), (last,) = (admission.reserve([Claim(n)]) for n in (60, 500, 30))
    assert (admission.outstanding, admission.waiting, admission.waiting_tokens) == (1, 2, 530)
    small.release()
    assert (admission.outstanding, admission.waiting_tokens) == (1, 30), "the large one, in its turn and alone"
    large.release()
    last.release()
    assert admission.outstanding == admission.waiting == admission.waiting_tokens == 0


async def test_one_that_leaves_the_head_of_the_queue_lets_those_behind_it_go_where_there_is_room_for_them() -> None:
    admission = Admission(Budget(10, tokens=100), max_waiting=10)
    (runs,), (large,), (small,) = (admission.reserve([Claim(n)]) for n in (60, 50, 30))
    assert small.granted_at is None, "its turn comes behind the large one"
    large.release()
    assert small.granted_at is not None
    assert runs.granted_at is not None


@pytest.mark.parametrize("seed", range(30))
async def test_random_lives_leave_no_room_unused_and_no_count_wrong(seed: int) -> None:
    draw, clock = random.Random(seed), Clock()
    budget = Budget(
        draw.choice((1, 2, 5)), draw.choice((math.inf, 10, 50)), draw.choice((None, 0, 2)), draw.choice((0, 2))
    )
    admission = Admission(budget, draw.choice((0, 1, 4)), draw.choice((0, 1, 2)), clock)
    tickets: list[Ticket] = []
    told: list[int] = []
    for _ in range(150):
        clock.now += draw.choice((0.0, 0.001, 1.0, 100.0))
        what = draw.random()
        try:
            if what < 0.5:
                claim = Claim(draw.choice((0, 1, 5, 60)), draw.choice("abc"), draw.choice((0, -9)), draw.random() < 0.3)
                tickets += admission.reserve([claim] * draw.choice((1, 1, 7)))
            elif what < 0.9 and tickets:
                tickets.pop(draw.randrange(len(tickets))).release()
            elif what < 0.95:
                admission.resize(draw.choice((0, 1, 3)))
            else:
                admission.check(draw.choice("abcd"), draw.random() < 0.5)
        except QueueFullError as error:
            told.append(error.retry_after_s)
        assert admission._next_to_grant() is None, "somebody waits for a place that is free"
        assert admission.outstanding or not admission.waiting
    assert all(1 <= seconds <= 120 for seconds in told)
    for ticket in tickets:
        ticket.release()
    assert admission.outstanding == admission.waiting == admission.waiting_tokens == admission._held_tokens == 0


async def test_the_budget_follows_the_number_of_replicas() -> None:
    admission = Admission(Budget(4, tokens=40), max_waiting=20, replicas=0)
    tickets = admission.reserve([Claim(10)] * 12)
    assert admission.outstanding == 1, "one calls for the first replica"
    admission.resize(1)
    assert admission.outstanding == 4
    admission.resize(2)
    assert admission.outstanding == 8
    admission.resize(1)
    for ticket in tickets[:5]:
        ticket.release()
    assert admission.outstanding == 4


async def test_tenants_share_the_queue_in_turn() -> None:
    admission = Admission(Budget(1), max_waiting=100)
    (running,) = admission.reserve([Claim(10, "a")])
    flood = admission.reserve([Claim(10, "a")] * 20)
    (other,) = admission.reserve([Claim(10, "b")])
    served = 0
    running.release()
    while other.granted_at is None:
        next(ticket for ticket in flood if ticket.granted_at is not None and ticket in admission._held).release()
        served += 1
    assert served <= 2


async def test_a_flood_that_fills_the_queue_gives_way_to_others() -> None:
    admission = Admission(Budget(1), max_waiting=4)
    flood = [admission.reserve([Claim(tenant="a")])[0] for _ in range(5)]
    with pytest.raises(QueueFullError):
        admission.reserve([Claim(tenant="a")])
    admission.check("b")
    admission.reserve([Claim(tenant="b")])
    with pytest.raises(QueueFullError):
        await flood[-1].granted()
    flood[-1].release()
    admission.reserve([Claim(tenant="b")])
    assert admission.waiting == 4
    with pytest.raises(QueueFullError):
        admission.check("b")  # it has half of it now


async def test_a_request_of_several_outputs_that_is_under_way_gives_way_last() -> None:
    admission = Admission(Budget(2), max_waiting=4)
    outputs = admission.reserve([Claim(tenant="a", priority=1)] * 5)
    (single,) = admission.reserve([Claim(tenant="a")])
    admission.reserve([Claim(tenant="b")])
    with pytest.raises(QueueFullError):
        await asyncio.wait_for(single.granted(), 1)
    assert not any(ticket._granted.done() for ticket in outputs[2:])
    single.release()
    admission.reserve([Claim(tenant="c")])
    with pytest.raises(QueueFullError):  # now there is nothing else that could
        await outputs[-1].granted()


async def test_a_place_in_the_queue_is_not_taken_for_one_that_would_have_more_than_the_other() -> None:
    admission = Admission(Budget(1), max_waiting=3)
    tickets = admission.reserve([Claim(tenant="a")] * 3) + admission.reserve([Claim(tenant="b")])
    assert admission.waiting == 3
    with pytest.raises(QueueFullError):
        admission.reserve([Claim(tenant="b")])  # two of three for b would be no fairer than two for a
    assert not any(ticket._granted.done() for ticket in tickets[1:])


async def test_the_batch_class_runs_where_there_is_room_and_waits_behind_all_others() -> None:
    admission = Admission(Budget(5, batch_requests=4), max_waiting=3)
    batch = admission.reserve([Claim(is_batch=True)] * 7)
    assert (admission.outstanding, admission.waiting) == (4, 3)
    (ordinary,) = admission.reserve([Claim()])
    assert ordinary.granted_at is not None
    (waits,) = admission.reserve([Claim()])
    with pytest.raises(QueueFullError):
        await batch[-1].granted()
    with pytest.raises(QueueFullError):
        admission.check(is_batch=True)
    batch[0].release()
    assert waits.granted_at is not None
    assert all(ticket.granted_at is None for ticket in batch[4:])


async def test_priority_counts_among_a_tenants_own() -> None:
    admission = Admission(Budget(1), max_waiting=10)
    (running,) = admission.reserve([Claim(tenant="a")])
    (normal,) = admission.reserve([Claim(tenant="a")])
    (urgent,) = admission.reserve([Claim(tenant="a", priority=-1)])
    running.release()
    assert (normal.granted_at is None, urgent.granted_at is None) == (True, False)


async def test_a_tenant_whose_places_are_all_taken_by_another_is_sent_on_nevertheless() -> None:
    """The engine makes places free for it."""
    admission = Admission(Budget(requests=20, tokens=80, spare=2), max_waiting=100)
    flood = admission.reserve([Claim(tokens=10, tenant="a")] * 30)
    assert granted(flood) == 8
    others = [admission.reserve([Claim(tokens=10, tenant="b")])[0] for _ in range(4)]
    assert granted(others) == 2, "the spare places, though the others hold all tokens"
    batch = admission.reserve([Claim(tenant="c", is_batch=True)])
    third = admission.reserve([Claim(tenant="c")])
    assert (granted(batch), granted(third)) == (0, 1), "to each of those who have few, and to no batch"
    for ticket in [*flood, *others]:
        ticket.release()
    assert granted([*batch, *third]) == 2
    assert admission._held_by == {"c": 2}


async def test_spare_places_are_not_for_one_that_holds_as_much_as_the_others() -> None:
    admission = Admission(Budget(requests=2, spare=2), max_waiting=100)
    for tenant in "ab":
        assert granted(admission.reserve([Claim(tenant=tenant)])) == 1
    assert granted(admission.reserve([Claim(tenant="a"), Claim(tenant="a")])) == 0
    assert granted(admission.reserve([Claim(tenant="c")])) == 0, "one place each: nobody has one too many"


def granted(tickets: list[Ticket]) -> int:
    return sum(ticket.granted_at is not None for ticket in tickets)
