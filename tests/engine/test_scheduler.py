"""The scheduler driven through the engine by a runner that checks every KV slot it reads."""

import random

import numpy as np
import pytest

from engine.engine import Engine
from engine.errors import ContextLengthError, InvalidRequestError
from engine.outputs import FinishReason, StepOutput
from engine.sampling_params import SamplingParams
from tests.scripted import ScriptedRunner, ShadowRunner, drain, shadow_continuation

VOCAB = 384


def engine(runner: ShadowRunner | ScriptedRunner | None = None, *, caching: bool = True, **info: object) -> Engine:
    info.setdefault("eos_token_ids", ())
    return Engine(runner or ShadowRunner(**info), enable_prefix_caching=caching)


def tokens(n: int, start: int = 0) -> list[int]:
    return [(start + i * 7) % VOCAB for i in range(n)]


def params(max_tokens: int | None = 8, **more: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **more)  # type: ignore[arg-type]


def assert_at_rest(engine: Engine) -> None:
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.live_blocks) == (0, 0, 0)
    assert stats.cached_blocks + stats.free_blocks == stats.total_blocks


@pytest.mark.parametrize("budget", [3, 16, 1000])
def test_a_long_prompt_gives_the_same_tokens_whatever_the_chunk(budget: int) -> None:
    e = engine(max_num_batched_tokens=budget)
    e.add_request("a", tokens(61), params(20))
    assert drain(e)["a"] == shadow_continuation(tokens(61), 20, VOCAB)
    assert isinstance(e.runner, ShadowRunner)
    assert e.runner.max_tokens_in_a_step == min(budget, 61)
    assert_at_rest(e)


def test_decodes_come_before_chunks_of_prompts_and_share_their_step() -> None:
    e = engine(ScriptedRunner([5], eos_token_ids=(), max_num_batched_tokens=8))
    e.add_request("short", tokens(4), params(30))
    e.step()
    e.add_request("long", tokens(40, 3), params(4))
    plans = e.runner.plans  # type: ignore[attr-defined]
    e.step()
    assert np.diff(plans[-1].query_start).tolist() == [1, 7], "the decode first, the rest of the budget to the prompt"
    generated = []
    for _ in range(5):
        generated += e.step().request_ids
    assert generated.count("short") == 5, "a running stream gets a token in every step of a long prompt"


@pytest.mark.parametrize("blocks", [1, 2, 4])
@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_a_prompt_around_a_block_boundary_sent_twice(blocks: int, extra: int) -> None:
    e = engine()
    prompt = tokens(4 * blocks + extra)
    expected = shadow_continuation(prompt, 6, VOCAB)
    for attempt in ("cold", "warm"):
        e.add_request(attempt, prompt, params(6))
        plans = drain(e)
        assert plans[attempt] == expected
    assert_at_rest(e)


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


def test_cached_tokens_are_zero_cold_and_counted_warm() -> None:
    e = engine()
    ended = []
    for name in ("cold", "warm"):
        e.add_request(name, tokens(11), params(2))
        while e.has_work():
            ended += e.step().finished
    assert [finished.num_cached_tokens for finished in ended] == [0, 8]
    assert e.stats().cached_prompt_tokens == 8


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
    results = drain(e)
    assert all(len(results[str(i)]) >= 1 for i in range(8))
    assert_at_rest(e)


def test_identical_prompts_give_identical_tokens() -> None:
    e = engine(max_num_batched_tokens=16)
    for i in range(8):
        e.add_request(str(i), tokens(19), params(9))
    results = drain(e)
    assert all(results[str(i)] == shadow_continuation(tokens(19), 9, VOCAB) for i in range(8))


def test_requests_wait_for_blocks_that_are_being_computed_even_in_chunks() -> None:
    e = engine(max_num_batched_tokens=8)
    e.add_request("first", tokens(24), params(2))
    e.add_request("same", tokens(24), params(2))
    e.add_request("other", tokens(4, 5), params(2))
    results = drain(e)
    assert results["first"] == results["same"] == shadow_continuation(tokens(24), 2, VOCAB)
    assert results["other"] == shadow_continuation(tokens(4, 5), 2, VOCAB)


def test_salted_prompts_share_no_blocks() -> None:
    e = engine()
    cached = {}
    for name, salt in (("a", "x"), ("b", "y"), ("c", "x")):
        e.add_request(name, tokens(12), params(1), cache_salt=salt)
        while e.has_work():
            for finished in e.step().finished:
                cached[name] = finished.num_cached_tokens
    assert cached == {"a": 0, "b": 0, "c": 12}


def test_concurrent_requests_that_preempt_each_other_give_the_tokens_of_a_big_pool() -> None:
    small = engine(num_blocks=10)
    for i in range(6):
        small.add_request(str(i), tokens(5 + i, i * 31), params(16))
    results = drain(small)
    assert small.stats().preemptions > 0
    for i in range(6):
        assert results[str(i)] == shadow_continuation(tokens(5 + i, i * 31), 16, VOCAB)
    assert_at_rest(small)


def test_the_newest_request_of_the_lowest_priority_is_preempted() -> None:
    e = engine(num_blocks=6, caching=False)
    e.add_request("urgent", tokens(4), params(12), priority=-1)
    e.add_request("old", tokens(4, 50), params(12))
    order: list[str] = []
    while e.has_work():
        order += [finished.request_id for finished in e.step().finished]
    assert order == ["urgent", "old"]
    assert e.stats().preemptions >= 1


def test_a_cycled_cache_gives_the_first_answer_again() -> None:
    e = engine(num_blocks=16)
    answers = []
    for name in ("first", "last"):
        e.add_request(name, tokens(21), params(10))
        answers.append(drain(e)[name])
        for i in range(12):
            e.add_request(f"{name}-{i}", tokens(20, 100 + i * 13), params(4))
            drain(e)
    assert answers[0] == answers[1] == shadow_continuation(tokens(21), 10, VOCAB)


def test_a_prompt_longer_than_the_pool_is_refused_and_an_output_limit_is_clamped_to_it() -> None:
    e = engine(num_blocks=4)  # 16 tokens
    with pytest.raises(ContextLengthError, match=r"16 tokens.*at most 16"):
        e.add_request("long", tokens(16), params(1))
    e.add_request("clamped", tokens(10), params(100))
    e.add_request("small", tokens(2, 9), params(2))
    output = []
    while e.has_work():
        output.append(e.step())
    ended = {finished.request_id: finished for step in output for finished in step.finished}
    assert ended["clamped"].num_output_tokens == 6
    assert ended["clamped"].reason is FinishReason.LENGTH
    assert ended["small"].num_output_tokens == 2
    assert_at_rest(e)


def test_a_small_request_behind_one_that_fills_the_pool_is_served_when_it_ends() -> None:
    e = engine(num_blocks=8, max_num_batched_tokens=64)
    e.add_request("big", tokens(30), params(None))
    e.add_request("small", tokens(3, 5), params(2))
    results = drain(e)
    assert results["small"] == shadow_continuation(tokens(3, 5), 2, VOCAB)
    assert len(results["big"]) == 2


def test_bad_ids_are_refused_before_they_reach_a_step() -> None:
    e = engine()
    for prompt in ([VOCAB], [-1], [1.5], [], [True]):
        with pytest.raises(InvalidRequestError):
            e.add_request("bad", prompt, params())  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="stop_token_ids"):
        e.add_request("bad", [1], params(stop_token_ids=[VOCAB]))
    assert not e.has_work()


def test_several_eos_ids_each_end_a_request_and_min_tokens_holds_them_off() -> None:
    script = [9, 8, 7, 6, 8, 5]
    e = engine(ScriptedRunner(script, eos_token_ids=(2, 8)))
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


def test_a_resumed_request_goes_on_as_if_it_had_never_stopped() -> None:
    whole = shadow_continuation(tokens(9), 12, VOCAB)
    e = engine()
    e.add_request("moved", tokens(9), params(12), whole[:5])
    ended = []
    results = []
    while e.has_work():
        output = e.step()
        results += output.token_ids
        ended += output.finished
    assert results == whole[5:]
    assert ended[0].num_prompt_tokens == 9
    assert ended[0].num_output_tokens == 12


def test_abort_in_every_state_frees_everything_and_is_idempotent() -> None:
    e = engine(max_num_seqs=2, max_num_batched_tokens=8)
    e.add_request("decoding", tokens(4), params(50))
    e.step()
    e.add_request("chunking", tokens(40, 5), params(50))
    e.step()
    e.add_request("queued", tokens(4, 9), params(50))
    e.step()
    assert e.stats().num_running == 2
    assert e.stats().num_waiting == 1
    for name in ("queued", "chunking", "decoding"):
        finished = e.abort(name)
        assert finished is not None
        assert finished.reason is FinishReason.ABORT
        assert e.abort(name) is None
    assert_at_rest(e)
    e.add_request("next", tokens(4), params(3))
    assert drain(e)["next"] == shadow_continuation(tokens(4), 3, VOCAB)


def test_a_failed_step_ends_its_requests_and_the_next_one_is_served() -> None:
    runner = ShadowRunner(eos_token_ids=())
    e = engine(runner)
    e.add_request("a", tokens(9), params(5))
    e.step()
    runner.fail_next = True
    output = e.step()
    assert [finished.reason for finished in output.finished] == [FinishReason.ERROR]
    assert_at_rest(e)
    e.add_request("b", tokens(9), params(5))
    assert drain(e)["b"] == shadow_continuation(tokens(9), 5, VOCAB)


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


def test_more_sequences_than_the_budget_never_starve_one() -> None:
    e = engine(max_num_seqs=8, max_num_batched_tokens=3)
    for i in range(8):
        e.add_request(str(i), tokens(6, i * 11), params(7))
    results = drain(e)
    for i in range(8):
        assert results[str(i)] == shadow_continuation(tokens(6, i * 11), 7, VOCAB)


@pytest.mark.parametrize("seed", range(40))
def test_random_adds_chunks_preemptions_and_aborts_never_misplace_a_slot(seed: int) -> None:
    rng = random.Random(seed)
    runner = ShadowRunner(
        num_blocks=rng.choice([8, 12, 40]),
        max_num_seqs=rng.choice([1, 3, 8]),
        max_num_batched_tokens=rng.choice([3, 7, 16, 100]),
        max_model_len=64,
        eos_token_ids=(),
    )
    e = engine(runner, caching=rng.random() < 0.8)
    longest = e.info.max_total_tokens
    shared = tokens(20, 3)
    wanted: dict[str, list[int]] = {}
    got: dict[str, list[int]] = {}
    failed: set[str] = set()

    def take(output: StepOutput) -> None:
        for request_id, token_id in zip(output.request_ids, output.token_ids, strict=True):
            got.setdefault(request_id, []).append(token_id)
        failed.update(f.request_id for f in output.finished if f.reason is FinishReason.ERROR)

    for i in range(60):
        if rng.random() < 0.5:
            prompt = shared[: rng.randint(0, 20)] + tokens(rng.randint(1, 10), rng.randint(0, 5))
            prompt = prompt[: longest - 1]
            name, count = str(i), rng.randint(1, 25)
            e.add_request(
                name, prompt, params(count), priority=rng.randint(0, 2), cache_salt=rng.choice([None, None, "s"])
            )
            wanted[name] = shadow_continuation(prompt, min(count, longest - len(prompt)), VOCAB)
        if wanted and rng.random() < 0.15:
            name = rng.choice(list(wanted))
            e.abort(name)
            failed.add(name)
        runner.fail_next = rng.random() < 0.03
        take(e.step())
        runner.fail_next = False
        blocks = e.scheduler.blocks
        assert blocks.num_live + blocks.num_cached + blocks.num_free == blocks.num_blocks
        assert 0 <= e.stats().slots_used <= blocks.num_live * e.info.block_size
    while e.has_work():
        take(e.step())
    for name, expected in wanted.items():
        tokens_got = got.get(name, [])
        assert tokens_got == (expected[: len(tokens_got)] if name in failed else expected)
    assert_at_rest(e)
