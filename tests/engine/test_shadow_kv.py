"""Whatever happens around a request, its tokens are those of an undisturbed one.

A runner whose KV slots hold hashes of their prefixes checks every slot that it reads; it runs step by step, with two
steps in flight, and with two in flight on a device that is late.
"""

import pytest

from engine.engine import Engine
from engine.errors import ContextLengthError
from engine.outputs import FinishReason
from engine.sampling_params import SamplingParams
from tests.scripted import LateRunner, ShadowRunner, drain, shadow_continuation

VOCAB = 384
MODES = ("step by step", "two in flight", "late device")


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def engine(mode: str, *, caching: bool = True, runner: ShadowRunner | None = None, **info: object) -> Engine:
    runner = runner or ShadowRunner(**({"eos_token_ids": ()} | info))
    return Engine(
        LateRunner(runner) if mode == "late device" else runner,
        enable_prefix_caching=caching,
        async_scheduling=mode != "step by step",
    )


def tokens(n: int, start: int = 0) -> list[int]:
    return [(start + i * 7) % VOCAB for i in range(n)]


def params(max_tokens: int | None = 8, **more: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **more)


def assert_at_rest(engine: Engine) -> None:
    engine.drain()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.live_blocks) == (0, 0, 0)
    assert stats.cached_blocks + stats.free_blocks == stats.total_blocks
    assert engine.scheduler.batch.num_free_rows == engine.info.max_num_seqs


@pytest.mark.parametrize("budget", [3, 16, 1000])
def test_a_long_prompt_gives_the_same_tokens_whatever_the_chunk(mode: str, budget: int) -> None:
    runner = ShadowRunner(max_num_batched_tokens=budget, eos_token_ids=())
    e = engine(mode, runner=runner)
    e.add_request("a", tokens(61), params(20))
    assert drain(e)["a"] == shadow_continuation(tokens(61), 20, VOCAB)
    assert runner.max_tokens_in_a_step == min(budget, 61)
    assert_at_rest(e)


@pytest.mark.parametrize("blocks", [1, 2, 4])
@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_a_prompt_around_a_block_boundary_sent_twice(mode: str, blocks: int, extra: int) -> None:
    e = engine(mode)
    prompt = tokens(4 * blocks + extra)
    expected = shadow_continuation(prompt, 6, VOCAB)
    for attempt in ("cold", "warm"):
        e.add_request(attempt, prompt, params(6))
        assert drain(e)[attempt] == expected
    assert_at_rest(e)


def test_cached_tokens_are_zero_cold_and_counted_warm(mode: str) -> None:
    e = engine(mode)
    ended = []
    for name in ("cold", "warm"):
        e.add_request(name, tokens(11), params(2))
        while e.has_work():
            ended += e.step().finished
    assert [finished.num_cached_tokens for finished in ended] == [0, 8]
    assert e.stats().cached_prompt_tokens == 8


def test_identical_prompts_give_identical_tokens(mode: str) -> None:
    e = engine(mode, max_num_batched_tokens=16)
    for i in range(8):
        e.add_request(str(i), tokens(19), params(9))
    results = drain(e)
    assert all(results[str(i)] == shadow_continuation(tokens(19), 9, VOCAB) for i in range(8))
    assert e.stats().cached_prompt_tokens == 7 * 16, "the full blocks are computed by one alone"
    assert_at_rest(e)


def test_requests_wait_for_blocks_that_are_being_computed_even_in_chunks(mode: str) -> None:
    e = engine(mode, max_num_batched_tokens=8)
    e.add_request("first", tokens(24), params(2))
    e.add_request("same", tokens(24), params(2))
    e.add_request("other", tokens(4, 5), params(2))
    results = drain(e)
    assert results["first"] == results["same"] == shadow_continuation(tokens(24), 2, VOCAB)
    assert results["other"] == shadow_continuation(tokens(4, 5), 2, VOCAB)


def test_salted_prompts_share_no_blocks(mode: str) -> None:
    e = engine(mode)
    cached = {}
    for name, salt in (("a", "x"), ("b", "y"), ("c", "x")):
        e.add_request(name, tokens(12), params(1), cache_salt=salt)
        while e.has_work():
            for finished in e.step().finished:
                cached[name] = finished.num_cached_tokens
    assert cached == {"a": 0, "b": 0, "c": 12}


def test_concurrent_requests_that_preempt_each_other_give_the_tokens_of_a_big_pool(mode: str) -> None:
    small = engine(mode, num_blocks=10)
    for i in range(6):
        small.add_request(str(i), tokens(5 + i, i * 31), params(16))
    results: dict[str, list[int]] = {}
    ended = {}
    while small.has_work():
        output = small.step()
        for name, token_id in zip(output.request_ids, output.token_ids, strict=True):
            results.setdefault(name, []).append(token_id)
        ended |= {finished.request_id: finished for finished in output.finished}
    assert small.stats().preemptions > 0
    for i in range(6):
        assert results[str(i)] == shadow_continuation(tokens(5 + i, i * 31), 16, VOCAB)
        end = ended[str(i)]
        assert (end.num_prompt_tokens, end.num_output_tokens, end.num_cached_tokens) == (5 + i, 16, 0)
    assert_at_rest(small)


def test_min_tokens_and_stop_tokens_count_from_the_prompt_after_preemption_too(mode: str) -> None:
    e = engine(mode, num_blocks=10)
    expected = {str(i): shadow_continuation(tokens(5 + i, i * 31), 14, VOCAB) for i in range(6)}
    for i in range(6):
        stop = params(16, min_tokens=14, stop_token_ids=[expected[str(i)][-1]])
        e.add_request(str(i), tokens(5 + i, i * 31), stop)
    assert drain(e) == expected
    assert e.stats().preemptions > 0
    assert_at_rest(e)


def test_the_newest_request_of_the_lowest_priority_is_preempted(mode: str) -> None:
    e = engine(mode, num_blocks=6, caching=False)
    e.add_request("urgent", tokens(4), params(12), priority=-1)
    e.add_request("old", tokens(4, 50), params(12))
    order: list[str] = []
    while e.has_work():
        order += [finished.request_id for finished in e.step().finished]
    assert order == ["urgent", "old"]
    assert e.stats().preemptions >= 1


def test_a_cycled_cache_gives_the_first_answer_again(mode: str) -> None:
    e = engine(mode, num_blocks=16)
    answers = []
    for name in ("first", "last"):
        e.add_request(name, tokens(21), params(10))
        answers.append(drain(e)[name])
        for i in range(12):
            e.add_request(f"{name}-{i}", tokens(20, 100 + i * 13), params(4))
            drain(e)
    assert answers[0] == answers[1] == shadow_continuation(tokens(21), 10, VOCAB)
    assert e.stats().cached_prompt_tokens == 0, "the pool went round: nothing of the first was left"


def test_a_prompt_longer_than_the_pool_is_refused_and_an_output_limit_is_clamped_to_it(
    mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    e = engine(mode, num_blocks=6)
    assert "a request may have 24 tokens instead of max_model_len 128" in caplog.text
    for length in (24, 25):
        with pytest.raises(ContextLengthError, match=rf"{length} tokens.*at most 24"):
            e.add_request("long", tokens(length), params(1))
    e.add_request("clamped", tokens(10), params(100))
    e.add_request("small", tokens(2, 9), params(2))
    output = []
    while e.has_work():
        output.append(e.step())
    ended = {finished.request_id: finished for step in output for finished in step.finished}
    assert list(ended) == ["small", "clamped"], "the small one waits for nothing"
    assert ended["clamped"].num_output_tokens == 14
    assert ended["clamped"].reason is FinishReason.LENGTH
    assert ended["small"].num_output_tokens == 2
    assert_at_rest(e)


def test_a_small_request_behind_one_that_fills_the_pool_is_served_when_it_ends(mode: str) -> None:
    e = engine(mode, num_blocks=8, max_num_batched_tokens=64)
    e.add_request("big", tokens(30), params(None))
    e.add_request("small", tokens(3, 5), params(2))
    results = drain(e)
    assert results["small"] == shadow_continuation(tokens(3, 5), 2, VOCAB)
    assert len(results["big"]) == 2


def test_a_resumed_request_goes_on_as_if_it_had_never_stopped(mode: str) -> None:
    whole = shadow_continuation(tokens(9), 12, VOCAB)
    e = engine(mode)
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


def test_abort_in_every_state_frees_everything_and_is_idempotent(mode: str) -> None:
    e = engine(mode, max_num_seqs=2, max_num_batched_tokens=8)
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


def test_a_failed_step_ends_its_requests_and_the_next_one_is_served(mode: str) -> None:
    runner = ShadowRunner(eos_token_ids=())
    e = engine(mode, runner=runner)
    e.add_request("a", tokens(9), params(5))
    e.step()
    runner.fail_next = True
    ended = []
    while e.has_work():
        ended += e.step().finished
    assert [finished.reason for finished in ended] == [FinishReason.ERROR]
    assert_at_rest(e)
    e.add_request("b", tokens(9), params(5))
    assert drain(e)["b"] == shadow_continuation(tokens(9), 5, VOCAB)


def test_more_sequences_than_the_budget_never_starve_one(mode: str) -> None:
    e = engine(mode, max_num_seqs=8, max_num_batched_tokens=3)
    for i in range(8):
        e.add_request(str(i), tokens(6, i * 11), params(7))
    results = drain(e)
    for i in range(8):
        assert results[str(i)] == shadow_continuation(tokens(6, i * 11), 7, VOCAB)
