"""The admission queue alone, with a clock of its own."""

import asyncio

import pytest

from app.admission import Admission, QueueFullError


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


async def test_first_come_first_served() -> None:
    admission = Admission(capacity=1, max_waiting=10)
    order: list[int] = []

    async def work(name: int) -> None:
        (ticket,) = admission.reserve()
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
    admission = Admission(capacity=2, max_waiting=1)
    tickets = [admission.reserve()[0] for _ in range(3)]
    assert (admission.outstanding, admission.waiting) == (2, 1)
    with pytest.raises(QueueFullError):
        admission.check()
    with pytest.raises(QueueFullError):
        admission.reserve()
    tickets[0].release()
    await asyncio.wait_for(tickets[2].granted(), 1)
    admission.check()
    assert (admission.outstanding, admission.waiting) == (2, 0)


async def test_release_is_idempotent_and_good_while_waiting() -> None:
    admission = Admission(capacity=1, max_waiting=2)
    (first,), (second,), (third,) = admission.reserve(), admission.reserve(), admission.reserve()
    second.release()
    second.release()
    first.release()
    first.release()
    await asyncio.wait_for(third.granted(), 1)
    assert (admission.outstanding, admission.waiting) == (1, 0)


async def test_a_waiter_that_was_cancelled_loses_no_place_of_others() -> None:
    admission = Admission(capacity=1, max_waiting=5)
    (first,), (second,), (third,) = admission.reserve(), admission.reserve(), admission.reserve()
    waiting = asyncio.ensure_future(second.granted())
    await asyncio.sleep(0)
    waiting.cancel()
    first.release()  # grants the second, whose waiter has just gone
    second.release()
    await asyncio.wait_for(third.granted(), 1)


async def test_many_prompts_enter_whole_or_not_at_all() -> None:
    admission = Admission(capacity=2, max_waiting=1)
    tickets = admission.reserve(5)
    assert (admission.outstanding, admission.waiting) == (2, 3)
    with pytest.raises(QueueFullError):
        admission.reserve(1)
    for ticket in tickets:
        ticket.release()
    assert (admission.outstanding, admission.waiting) == (0, 0)


async def test_no_queue_still_uses_the_capacity() -> None:
    admission = Admission(capacity=1, max_waiting=0)
    admission.reserve()
    with pytest.raises(QueueFullError):
        admission.reserve()


async def test_retry_after_follows_the_pace_of_releases() -> None:
    clock = Clock()
    admission = Admission(capacity=1, max_waiting=1, clock=clock)
    for _ in range(10):
        (ticket,) = admission.reserve()
        clock.now += 4.0
        ticket.release()
    admission.reserve(2)
    with pytest.raises(QueueFullError) as caught:
        admission.check()
    assert 4 <= caught.value.retry_after_s <= 5
    assert "4 s" in str(caught.value)
    clock.now += 100.0  # nothing is released any more: the estimate rises
    with pytest.raises(QueueFullError) as caught:
        admission.check()
    assert caught.value.retry_after_s > 10


async def test_retry_after_before_the_first_release_is_at_least_what_the_oldest_has_taken() -> None:
    clock = Clock()
    admission = Admission(capacity=2, max_waiting=0, clock=clock)
    admission.reserve(2)
    clock.now += 10.0
    with pytest.raises(QueueFullError) as caught:
        admission.check()
    assert caught.value.retry_after_s == 5
