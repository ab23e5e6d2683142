"""Quiet decode steps are planned by a short way; what interrupts them finds the books as the long way leaves them."""

import numpy as np
import pytest

from engine.engine import Engine
from engine.outputs import FinishReason
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from tests.scripted import ScriptedRunner, ShadowRunner, drain, shadow_continuation

VOCAB = 384


def tokens(n: int, start: int = 0) -> list[int]:
    return [(start + i * 7) % VOCAB for i in range(n)]


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens)


def quiet_engine(runner: ShadowRunner | ScriptedRunner | None = None, prompts: int = 2) -> Engine:
    """An engine in the middle of a streak."""
    engine = Engine(runner or ShadowRunner(block_size=16, eos_token_ids=()))
    for i in range(prompts):
        engine.add_request(str(i), tokens(16, i), params(60))
    while scheduler_of(engine)._streaks.current is None:
        engine.step()
    engine.step()
    return engine


def scheduler_of(engine: Engine) -> Scheduler:
    return engine.scheduler


def rest(engine: Engine, name: str, prompt: list[int], count: int) -> None:
    whole = shadow_continuation(prompt, count, VOCAB)
    got = drain(engine)[name]
    assert got == whole[count - len(got) :]
    assert engine.stats().live_blocks == 0


def test_most_steps_of_a_quiet_batch_are_streaks(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = quiet_engine(prompts=1)
    general = 0
    plan = engine.scheduler._plans.plan

    def counted(*args: object, **kwargs: object) -> object:
        nonlocal general
        general += 1
        return plan(*args, **kwargs)

    monkeypatch.setattr(engine.scheduler._plans, "plan", counted)
    for _ in range(32):
        engine.step()
    assert general <= 6


def test_tokens_are_those_of_the_long_way() -> None:
    rest(quiet_engine(), "1", tokens(16, 1), 60)


def test_a_newcomer_is_admitted_at_once() -> None:
    engine = quiet_engine()
    engine.add_request("new", tokens(10, 9), params(5))
    assert "new" in engine.step().request_ids
    rest(engine, "0", tokens(16, 0), 60)


def test_an_abort_leaves_the_others_going() -> None:
    engine = quiet_engine()
    finished = engine.abort("0")
    assert finished is not None
    assert finished.num_output_tokens > 1
    rest(engine, "1", tokens(16, 1), 60)


def test_an_abort_counts_what_was_made() -> None:
    engine = quiet_engine(prompts=1)
    made = engine.stats().generation_tokens
    finished = engine.abort("0")
    assert finished is not None
    assert finished.num_output_tokens == made
    assert engine.stats().live_blocks == 0


def test_a_failed_step_ends_its_requests_and_leaks_nothing() -> None:
    runner = ShadowRunner(block_size=16, eos_token_ids=())
    engine = quiet_engine(runner)
    runner.fail_next = True
    assert {finished.reason for finished in engine.step().finished} == {FinishReason.ERROR}
    assert engine.stats().live_blocks == 0
    engine.add_request("next", tokens(16, 1), params(60))
    rest(engine, "next", tokens(16, 1), 60)


def test_a_stop_token_ends_a_request_inside_a_streak() -> None:
    engine = quiet_engine(ScriptedRunner([9] * 8 + [2, 7], block_size=16, eos_token_ids=(2,)), prompts=1)
    ended = []
    while engine.has_work():
        ended += engine.step().finished
    assert (ended[0].reason, ended[0].num_output_tokens, ended[0].stop_token_id) == (FinishReason.STOP, 9, 2)


def test_gauges_are_true_inside_a_streak() -> None:
    engine = quiet_engine()
    stats = engine.stats()
    # Each has a prompt of 16 tokens and all outputs but the last, which is not computed yet.
    assert stats.slots_used == 2 * 16 + stats.generation_tokens - 2
    assert scheduler_of(engine)._streaks.current is not None, "looking changes nothing"


def test_a_limit_inside_a_streak_is_met_exactly() -> None:
    for count in range(1, 20):
        engine = Engine(ShadowRunner(block_size=16, eos_token_ids=()))
        engine.add_request("a", tokens(3), params(count))
        assert drain(engine)["a"] == shadow_continuation(tokens(3), count, VOCAB)
        assert np.all(engine.scheduler.batch.in_flight == 0)
