import threading
import time
from collections.abc import Callable

import pytest

from engine.engine import Engine
from engine.errors import ContextLengthError, EngineDeadError, InvalidRequestError
from engine.outputs import Finished, FinishReason, StepOutput
from engine.sampling_params import SamplingParams
from engine.step import StepPlan
from engine.step_loop import StepLoop
from tests.scripted import ScriptedRunner


class Listener:
    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, Finished] = {}
        self.calls = 0
        self.changed = threading.Condition()

    def __call__(self, output: StepOutput) -> None:
        with self.changed:
            self.calls += 1
            for request_id, token_id in zip(output.request_ids, output.token_ids, strict=True):
                self.tokens.setdefault(request_id, []).append(token_id)
            for finished in output.finished:
                assert finished.request_id not in self.ended, "ended twice"
                self.ended[finished.request_id] = finished
            self.changed.notify_all()

    def wait(self, *names: str) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.ended.keys() >= set(names), timeout=20)


def start(before_step: Callable[[StepPlan], None] = lambda plan: None) -> tuple[StepLoop, Listener]:
    listener = Listener()
    loop = StepLoop(Engine(ScriptedRunner([5, 6, 7], before_step=before_step)), listener)
    loop.start()
    return loop, listener


def params(max_tokens: int | None = 3) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens)


def test_requests_from_many_threads_end_once_each() -> None:
    loop, listener = start()
    names = [f"{i}" for i in range(40)]

    def submit(part: list[str]) -> None:
        for name in part:
            loop.submit(name, [int(name) + 1, 3], params())

    threads = [threading.Thread(target=submit, args=(names[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    listener.wait(*names)
    assert all(listener.tokens[name] == [5, 6, 7] for name in names)
    assert loop.stats().live_blocks == 0
    loop.close()


def test_tokens_of_a_step_come_in_one_call() -> None:
    gate = threading.Event()
    loop, listener = start(lambda plan: gate.wait(20) and None)
    for name in "abcd":
        loop.submit(name, [ord(name)], params())
    gate.set()
    listener.wait(*"abcd")
    assert listener.calls < sum(map(len, listener.tokens.values()))
    loop.close()


def test_refusals_reach_the_caller_and_nothing_else() -> None:
    loop, listener = start()
    with pytest.raises(ContextLengthError):
        loop.submit("long", [1] * 128, params())
    with pytest.raises(InvalidRequestError):
        loop.submit("id", [99999], params())
    loop.submit("good", [1], params())
    listener.wait("good")
    assert listener.ended.keys() == {"good"}
    loop.close()


def test_a_request_id_can_be_used_once_at_a_time() -> None:
    gate = threading.Event()
    loop, listener = start(lambda plan: gate.wait(20) and None)
    loop.submit("a", [1], params())
    with pytest.raises(InvalidRequestError, match="already"):
        loop.submit("a", [1], params())
    gate.set()
    listener.wait("a")
    loop.close()


def test_an_abort_ends_a_running_request_and_may_be_repeated() -> None:
    loop, listener = start(lambda plan: time.sleep(0.005))
    loop.submit("a", [1], params(None))
    while not listener.tokens:
        time.sleep(0.001)
    loop.abort("a")
    loop.abort("a")
    listener.wait("a")
    assert listener.ended["a"].reason is FinishReason.ABORT
    loop.submit("b", [1], params())
    listener.wait("b")
    assert loop.stats().live_blocks == 0
    loop.close()


def test_an_abort_that_arrives_before_its_request_holds() -> None:
    loop, listener = start()
    loop.abort("early")
    loop.submit("early", [1], params())
    listener.wait("early")
    assert listener.ended["early"].reason is FinishReason.ABORT
    assert "early" not in listener.tokens
    loop.close()


def test_a_failed_step_fails_its_requests_and_serves_the_next() -> None:
    failures = [RuntimeError("once")]

    def before_step(plan: StepPlan) -> None:
        if failures:
            raise failures.pop()

    loop, listener = start(before_step)
    loop.submit("a", [1], params())
    listener.wait("a")
    assert listener.ended["a"].reason is FinishReason.ERROR
    loop.check_health(10)
    loop.submit("b", [1], params())
    listener.wait("b")
    assert listener.ended["b"].reason is FinishReason.LENGTH
    loop.close()


def test_an_engine_that_keeps_failing_is_dead_and_says_so() -> None:
    def before_step(plan: StepPlan) -> None:
        raise RuntimeError("broken")

    loop, listener = start(before_step)
    for i in range(3):
        loop.submit(str(i), [1], params())
        listener.wait(str(i))
    deadline = time.monotonic() + 20
    while loop._thread.is_alive():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(EngineDeadError):
        loop.check_health(10)
    with pytest.raises(EngineDeadError):
        loop.submit("late", [1], params())


def test_a_step_that_hangs_is_unhealthy_and_an_idle_engine_is_not() -> None:
    gate = threading.Event()
    loop, listener = start(lambda plan: gate.wait(20) and None)
    time.sleep(0.05)
    loop.check_health(0.01)
    loop.submit("a", [1], params())
    time.sleep(0.1)
    with pytest.raises(EngineDeadError, match="no step for"):
        loop.check_health(0.05)
    gate.set()
    listener.wait("a")
    loop.close()


def test_closing_ends_what_runs() -> None:
    loop, listener = start(lambda plan: time.sleep(0.005))
    loop.submit("a", [1], params(None))
    loop.close()
    loop.close()
    assert listener.ended["a"].reason is FinishReason.ABORT
    with pytest.raises(EngineDeadError):
        loop.submit("b", [1], params())


def test_the_engine_is_closed_even_if_the_consumer_fails() -> None:
    closed = threading.Event()
    runner = ScriptedRunner([5])
    runner.close = closed.set

    def consumer(output: StepOutput) -> None:
        raise RuntimeError("cannot take it")

    loop = StepLoop(Engine(runner), consumer)
    loop.start()
    loop.submit("a", [1], params())
    assert closed.wait(20)


def test_closing_before_the_start_ends_what_was_submitted() -> None:
    listener = Listener()
    loop = StepLoop(Engine(ScriptedRunner([5])), listener)
    loop.submit("a", [1], params())
    loop.close()
    loop.close()
    assert listener.ended["a"].reason is FinishReason.ABORT


def test_closing_from_the_consumer_does_not_wait_for_itself() -> None:
    listener = Listener()

    def consumer(output: StepOutput) -> None:
        listener(output)
        loop.close()

    loop = StepLoop(Engine(ScriptedRunner([5])), consumer)
    loop.start()
    loop.submit("a", [1], params(None))
    listener.wait("a")
    assert listener.ended["a"].reason is FinishReason.ABORT


def test_a_request_that_cannot_be_added_ends_alone() -> None:
    loop, listener = start()
    loop.submit("bad", [1] * 9, params(), block_hashes=["not bytes"])
    loop.submit("good", [1], params())
    listener.wait("bad", "good")
    assert listener.ended["bad"].reason is FinishReason.ERROR
    assert listener.ended["good"].reason is FinishReason.LENGTH
    loop.close()
