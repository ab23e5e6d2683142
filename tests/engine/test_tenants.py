"""Tenants and the batch class in the engine: who runs, who waits, who gives way."""

import pytest

from engine.engine import Engine
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.scheduling.waiting import WaitingQueue
from tests.scripted import ScriptedRunner, drain


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens)


def order_of_ends(engine: Engine) -> list[str]:
    ends: list[str] = []
    while engine.has_work():
        ends += [finished.request_id for finished in engine.step().finished]
    return ends


def test_a_flood_of_one_tenant_holds_up_no_other() -> None:
    engine = Engine(ScriptedRunner([5], eos_token_ids=(), max_num_seqs=1))
    for i in range(20):
        engine.add_request(f"flood {i}", [1, 2, i], params(4), tenant="a", priority=-5)
    for _ in range(6):
        engine.step()
    engine.add_request("other", [9, 9], params(4), tenant="b", priority=5)
    ends = order_of_ends(engine)
    assert ends.index("other") <= 3, "priority counts among a tenant's own requests alone"
    assert len(ends) == 20, "with one that ended before"


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("short_of", ["rows", "blocks"])
def test_long_outputs_of_one_tenant_give_half_of_the_places_to_another(asynchronous: bool, short_of: str) -> None:
    room = {"max_num_seqs": 4} if short_of == "rows" else {"num_blocks": 40, "block_size": 4}
    engine = Engine(ScriptedRunner([5, 6, 7], eos_token_ids=(), **room), async_scheduling=asynchronous)
    for i in range(8):
        engine.add_request(f"long {i}", [1, 2, i, *[4] * 20], params(12), tenant="a")
    tokens: dict[str, int] = {}
    ends: list[str] = []

    def step() -> None:
        output = engine.step()
        for name in output.request_ids:
            tokens[name] = tokens.get(name, 0) + 1
        ends.extend(finished.request_id for finished in output.finished)

    for _ in range(5):
        step()
    running = engine.stats().num_running
    for i in range(8):
        engine.add_request(f"other {i}", [9, i, *[4] * 20], params(12), tenant="b")
    for _ in range(10):
        step()
    begun = [name for name in tokens if name.startswith("other")]
    assert len(begun) >= running // 2 > 0
    assert engine.stats().preemptions == running // 2, "and no place goes back and forth"
    while engine.has_work():
        step()
    assert tokens == dict.fromkeys(tokens, 12)
    assert len(tokens) == len(ends) == 16
    assert engine.stats().live_blocks == 0


def test_a_place_is_not_taken_for_one_that_would_leave_the_other_with_less() -> None:
    engine = Engine(ScriptedRunner([5], eos_token_ids=(), max_num_seqs=2))
    for tenant in ("a", "b"):
        engine.add_request(tenant, [1, 2], params(20), tenant=tenant)
    engine.step()
    for tenant in ("a", "b", "c"):
        engine.add_request(f"{tenant} again", [3, 4], params(4), tenant=tenant)
    order_of_ends(engine)
    assert engine.stats().preemptions == 0


def test_statistics_tell_what_waits() -> None:
    engine = Engine(ScriptedRunner([5], eos_token_ids=(), max_num_seqs=1))
    for i in range(3):
        engine.add_request(str(i), [1, 2, i], params(4))
    engine.step()
    stats = engine.stats()
    assert (stats.num_waiting, stats.waiting_tokens) == (2, 6)
    assert stats.queue_age_s > 0
    engine.abort("1")
    assert engine.stats().waiting_tokens == 3
    drain(engine)
    stats = engine.stats()
    assert (stats.num_waiting, stats.waiting_tokens, stats.queue_age_s) == (0, 0, 0)


def waiting_request(name: str, is_batch: bool = False) -> Request:
    return Request(name, [1, 2], [], params(4), seed=0, limit=6, stop_ids=(), is_batch=is_batch)


def test_the_longest_wait_is_of_the_first_that_has_waited_all_the_time() -> None:
    now = [10.0]
    queue = WaitingQueue(lambda: now[0])
    first, second, later = waiting_request("first"), waiting_request("second"), waiting_request("later")
    queue.arrive(first)
    now[0] = 11.0
    queue.arrive(second)
    for entry in [queue.pop(), queue.pop()]:
        assert entry is not None
    assert queue.longest_wait_s() == 0
    now[0] = 14.0
    queue.arrive(later)
    now[0] = 15.0
    queue.push(second)  # it has been preempted
    now[0] = 17.0
    assert queue.longest_wait_s() == 3.0
    queue.remove(later)
    assert queue.longest_wait_s() == 2.0


def test_those_that_have_left_the_queue_are_forgotten_though_one_waits_for_ever() -> None:
    queue = WaitingQueue(lambda: 0.0)
    queue.arrive(waiting_request("patient", is_batch=True))
    for i in range(1000):
        queue.arrive(waiting_request(str(i)))
        assert queue.pop() is not None
    assert len(queue._since) < 100


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_batch_class_gives_its_place_to_others_and_ends_whole(asynchronous: bool) -> None:
    engine = Engine(ScriptedRunner([5, 6, 7, 8], eos_token_ids=(), max_num_seqs=2), async_scheduling=asynchronous)
    lengths = {"batch 0": 30, "batch 1": 30, "ordinary": 5}
    tokens: dict[str, int] = dict.fromkeys(lengths, 0)
    for name in ("batch 0", "batch 1"):
        engine.add_request(name, [1, 2, int(name[-1])], params(30), is_batch=True)
    ends: list[str] = []

    def step() -> None:
        output = engine.step()
        for name in output.request_ids:
            tokens[name] += 1
        ends.extend(finished.request_id for finished in output.finished)

    for _ in range(6):
        step()
    engine.add_request("ordinary", [3, 3], params(5))
    while engine.has_work():
        step()
    assert ends[0] == "ordinary"
    assert tokens == lengths
    assert engine.stats().preemptions == 1
    assert engine.stats().live_blocks == 0


def test_the_batch_class_gives_its_blocks_to_others() -> None:
    engine = Engine(ScriptedRunner([5], eos_token_ids=(), num_blocks=8, block_size=4, max_num_batched_tokens=32))
    engine.add_request("batch", list(range(20)), params(8), is_batch=True)
    engine.step()
    engine.add_request("ordinary", list(range(50, 70)), params(8))
    assert order_of_ends(engine)[0] == "ordinary"
    assert engine.stats().live_blocks == 0


def test_the_batch_class_runs_beside_others_where_there_is_room() -> None:
    engine = Engine(ScriptedRunner([5], eos_token_ids=(), max_num_seqs=2))
    engine.add_request("batch", [1, 2], params(4), is_batch=True)
    engine.add_request("ordinary", [3, 4], params(20))
    assert order_of_ends(engine) == ["batch", "ordinary"]
    assert engine.stats().preemptions == 0


def test_those_of_the_batch_class_that_come_within_a_microsecond_keep_their_order() -> None:
    """Also when both have begun, have given their places up, and wait again."""
    now = [1e5]
    queue = WaitingQueue(lambda: now[0])
    for name in "ab":
        queue.arrive(waiting_request(name, is_batch=True))
        now[0] += 1e-6
    entries = [queue.pop(), queue.pop()]
    for entry in reversed(entries):
        assert entry is not None
        queue.push(entry.item)
    assert [entry.item.request_id for entry in (queue.pop(), queue.pop()) if entry is not None] == ["a", "b"]
