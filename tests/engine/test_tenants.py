"""Tenants and the batch class in the engine: who runs, who waits, who gives way."""

import pytest

from engine.engine import Engine
from engine.sampling_params import SamplingParams
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
