"""What the scheduler plans, step by step, driven through the engine by a runner that keeps the plans."""

import numpy as np
import pytest

from engine.block_hash import block_hashes
from engine.engine import Engine
from engine.errors import EngineDeadError, InvalidRequestError
from engine.outputs import FinishReason, StepOutput
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from engine.scheduling.fair_queue import PRIORITY_S
from engine.step import StepPlan, StepResult
from tests.scripted import ScriptedRunner, drain

VOCAB = 384


def engine(runner: ScriptedRunner) -> Engine:
    return Engine(runner)


def tokens(n: int, start: int = 0) -> list[int]:
    return [(start + i * 7) % VOCAB for i in range(n)]


def params(max_tokens: int | None = 8, **more: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **more)


def test_decodes_come_before_chunks_of_prompts_and_share_their_step() -> None:
    runner = ScriptedRunner([5], eos_token_ids=(), max_num_batched_tokens=8)
    e = engine(runner)
    e.add_request("short", tokens(4), params(30))
    e.step()
    e.add_request("long", tokens(40, 3), params(4))
    e.step()
    assert np.diff(runner.plans[-1].query_start).tolist() == [1, 7], (
        "the decode first, the rest of the budget to the prompt"
    )
    generated = []
    for _ in range(5):
        generated += e.step().request_ids
    assert generated.count("short") == 5, "a running stream gets a token in every step of a long prompt"


def test_a_full_hit_computes_only_the_last_token_and_writes_no_shared_block() -> None:
    runner = ScriptedRunner([5], eos_token_ids=())
    e = engine(runner)
    e.add_request("cold", tokens(8), params(1))
    drain(e)
    e.add_request("warm", tokens(8), params(1))
    output = e.step()
    plan = runner.plans[-1]
    assert plan.positions.tolist() == [7]
    assert plan.slots.tolist() == [-1]
    assert output.finished[0].num_cached_tokens == 8


def test_what_the_cache_had_of_a_prompt_is_told_once_with_tokens() -> None:
    runner = ScriptedRunner([5], eos_token_ids=(), max_num_batched_tokens=8)
    e = engine(runner)
    e.add_request("cold", tokens(8), params(1))
    drain(e)
    e.add_request("warm", [*tokens(8), *tokens(12, 3)], params(3))
    outputs = [e.step() for _ in range(4)]
    assert [output.token_ids for output in outputs] == [[], [5], [5], [5]]
    assert [output.cached_tokens for output in outputs] == [{}, {"warm": 8}, {}, {}]
    assert outputs[-1].finished[0].num_cached_tokens == 8


def test_without_a_prefix_cache_no_prompt_waits_for_an_identical_one() -> None:
    runner = ScriptedRunner([5], eos_token_ids=(), max_num_batched_tokens=32)
    e = Engine(runner, enable_prefix_caching=False)
    for name in ("a", "b"):
        e.add_request(name, tokens(12), params(2), block_hashes=block_hashes(tokens(12), runner.info.block_size))
    e.step()
    assert np.diff(runner.plans[-1].query_start).tolist() == [12, 12]


def test_identical_prompts_are_computed_and_held_once() -> None:
    runner = ScriptedRunner([5], eos_token_ids=(), max_num_batched_tokens=64)
    e = engine(runner)
    for i in range(8):
        e.add_request(str(i), tokens(16), params(3))
    e.step()
    assert runner.plans[0].num_tokens == 16, "one computes, the others wait for its blocks"
    e.step()
    assert e.stats().num_running == 8
    assert e.stats().live_blocks == 4 + 1, "the prompt once, and the block of the one that has gone on"
    computed = sum(plan.num_tokens for plan in runner.plans)
    assert computed == 16 + 1 + 7
    drain(e)
    stats = e.stats()
    assert (stats.live_blocks, stats.generation_tokens) == (0, 8 * 3)
    assert stats.cached_blocks + stats.free_blocks == stats.total_blocks


def test_bad_ids_are_refused_before_they_reach_a_step() -> None:
    e = engine(ScriptedRunner([5]))
    for prompt in ([VOCAB], [-1], [1.5], [], [True]):
        with pytest.raises(InvalidRequestError):
            e.add_request("bad", prompt, params())
    with pytest.raises(InvalidRequestError, match="stop_token_ids"):
        e.add_request("bad", [1], params(stop_token_ids=[VOCAB]))
    assert not e.has_work()


@pytest.mark.parametrize("overlap", [False, True])
def test_several_eos_ids_each_end_a_request_and_min_tokens_holds_them_off(overlap: bool) -> None:
    script = [9, 8, 7, 6, 8, 5]
    e = Engine(ScriptedRunner(script, eos_token_ids=(2, 8)), async_scheduling=overlap)
    e.add_request("eos", [1], params(20))
    e.add_request("later", [3], params(20, min_tokens=5))
    e.add_request("ignored", [4], params(6, ignore_eos=True))
    ended = {}
    results: dict[str, list[int]] = {}
    while e.has_work():
        output = e.step()
        for request_id, token_id in zip(output.request_ids, output.token_ids, strict=True):
            results.setdefault(request_id, []).append(token_id)
        ended |= {finished.request_id: finished for finished in output.finished}
    assert results == {"eos": [9, 8], "later": [9, 8, 7, 6, 8], "ignored": script}
    assert ended["eos"].reason is FinishReason.STOP
    assert ended["eos"].stop_token_id == 8
    assert ended["later"].stop_token_id == 8
    assert ended["ignored"].reason is FinishReason.LENGTH


def test_stop_tokens_are_barred_from_the_logits_before_min_tokens() -> None:
    runner = ScriptedRunner([9], eos_token_ids=(2,))
    e = engine(runner)
    e.add_request("a", [1], params(4, min_tokens=2, stop_token_ids=[7]))
    drain(e)
    barred = [plan.forbidden and plan.forbidden[1].tolist() for plan in runner.plans]
    assert barred == [[2, 7], None, None, None]


def test_without_chunked_prefill_prompts_are_computed_whole() -> None:
    runner = ScriptedRunner([5], eos_token_ids=(), max_num_batched_tokens=16)
    e = Engine(runner, enable_chunked_prefill=False)
    e.add_request("a", tokens(100), params(2))
    e.add_request("b", tokens(90, 3), params(2))
    drain(e)
    longest = [int(np.diff(plan.query_start).max()) for plan in runner.plans]
    assert 100 in longest
    assert 90 in longest
    assert not set(longest) - {1, 90, 100}


def test_a_request_that_stops_loses_the_token_of_the_step_in_flight() -> None:
    runner = ScriptedRunner([9, 2, 7], eos_token_ids=(2,))
    e = Engine(runner, async_scheduling=True)
    e.add_request("a", [1], params(20))
    assert e.step().token_ids == [], "launched and not yet due"
    assert e.step().token_ids == [9]
    output = e.step()
    assert output.token_ids == [2]
    assert output.finished[0].num_output_tokens == 2
    assert e.stats().live_blocks == 1, "the step in flight still writes there"
    assert e.has_work()
    assert e.step() == StepOutput()
    assert not e.has_work()
    assert e.stats().live_blocks == 0


def test_a_request_that_ends_by_length_is_planned_for_no_longer() -> None:
    runner = ScriptedRunner([9], eos_token_ids=())
    e = Engine(runner, async_scheduling=True)
    e.add_request("a", [1], params(3))
    assert drain(e)["a"] == [9, 9, 9]
    assert len(runner.plans) == 3


def test_tokens_that_are_on_the_device_alone_are_named_in_the_plan() -> None:
    runner = ScriptedRunner([9], eos_token_ids=())
    e = Engine(runner, async_scheduling=True)
    e.add_request("a", [1, 3], params(3))
    e.add_request("b", [4], params(3))
    drain(e)
    assert runner.plans[0].pending is None
    assert [plan.pending.tolist() for plan in runner.plans[1:] if plan.pending is not None] == [[0, 1], [0, 1]]


def test_an_aged_request_is_served_before_newcomers_of_a_higher_priority() -> None:
    now = [0.0]
    scheduler = Scheduler(
        num_blocks=8,
        block_size=4,
        max_num_seqs=1,
        max_num_batched_tokens=16,
        max_total_tokens=32,
        clock=lambda: now[0],
    )
    order = []

    def add(name: str, priority: int) -> None:
        scheduler.add(Request(name, [1], [], params(1), seed=0, limit=2, stop_ids=(), priority=priority))

    def serve() -> None:
        plan = scheduler.schedule()
        assert plan is not None
        order.extend(scheduler.commit(plan, StepResult(np.array([5]))).request_ids)

    add("patient", 3)
    add("normal", 0)
    add("urgent", -1)
    serve()
    serve()
    for i in range(6):  # one newcomer a minute: by their priority they would keep the other out for ever
        now[0] = i * PRIORITY_S + 1
        add(f"newcomer {i}", 0)
        serve()
    serve()
    assert order[:2] == ["urgent", "normal"]
    assert order[2:6] == ["newcomer 0", "newcomer 1", "newcomer 2", "patient"], "three levels are worth three minutes"


def test_a_lost_runner_ends_the_engine_at_once() -> None:
    def lost(plan: StepPlan) -> None:
        raise EngineDeadError("the device is gone")

    e = engine(ScriptedRunner([5], before_step=lost))
    e.add_request("a", [1], params(3))
    with pytest.raises(EngineDeadError, match="device"):
        e.step()


@pytest.mark.parametrize("overlap", [False, True])
def test_decodes_of_the_same_rows_share_their_arrays_and_no_others_do(overlap: bool) -> None:
    runner = ScriptedRunner([5], eos_token_ids=(), max_num_batched_tokens=64)
    e = Engine(runner, async_scheduling=overlap)
    for i, length in enumerate((4, 7, 9)):
        e.add_request(str(i), tokens(length, i), params(40))
    for _ in range(12):
        e.step()
    decodes = runner.plans[1:]
    assert all(plan.query_start is decodes[0].query_start and plan.sample is decodes[0].sample for plan in decodes)
    e.add_request("more", tokens(5, 3), params(40))
    for _ in range(3):
        e.step()
    assert [np.diff(plan.query_start).tolist() for plan in runner.plans[-2:]] == [[1] * 4] * 2
    assert runner.plans[-1].sample.tolist() == [0, 1, 2, 3]
    assert runner.plans[-1].query_start is runner.plans[-2].query_start
    e.abort("1")
    for _ in range(3):
        e.step()
    assert [plan.sample.tolist() for plan in runner.plans[-2:]] == [[0, 1, 2]] * 2


def test_blocks_that_several_decodes_complete_in_one_step_are_found_by_their_own_tokens() -> None:
    runner = ScriptedRunner([5, 6, 7, 8, 9], eos_token_ids=(), max_num_batched_tokens=64)
    e = engine(runner)
    for i in range(3):
        e.add_request(str(i), tokens(6, i), params(5))
    drain(e)
    for i in range(3):
        e.add_request(f"again {i}", [*tokens(6, i), 5, 6, 7], params(1))
        assert e.step().finished[0].num_cached_tokens == 8
