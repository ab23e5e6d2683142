"""Replicas that are there and say nothing: what asks them, who loses by it, and what hangs for them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from app.engine_client import Submission
from app.failover import FailoverClient
from app.openai.errors import EngineFault
from app.replica import EngineReplica
from app.reports.pool import Pool
from app.transport.serve_client import ServeEngineClient
from app.transport.silence import watch
from engine.engine import Engine
from engine.outputs import FinishReason, StepOutput
from engine.sampling_params import SamplingParams
from engine.step_loop import StepLoop
from tests.app.harness import until
from tests.app.http.test_lifecycle import Gate
from tests.app.local_handle import LocalCall, LocalHandle
from tests.app.test_failover import tokens
from tests.scripted import ScriptedRunner

NUM_TOKENS = 60


class Silent:
    """Two replicas of which each can be made to stand still and say nothing, as a process that is stopped."""

    def __init__(self) -> None:
        self.gates = [Gate(0.002), Gate(0.002)]
        engines = [Engine(ScriptedRunner([5, 6, 7], before_step=gate)) for gate in self.gates]
        self.replicas = [
            EngineReplica(lambda on_output, e=engine: StepLoop(e, on_output), name=f"replica {i}")
            for i, engine in enumerate(engines)
        ]
        self.handle = LocalHandle(self.replicas)
        self.pool = Pool()
        self.pool.update([replica.name for replica in self.replicas])
        self.transport = ServeEngineClient(self.handle)
        self.client = FailoverClient(self.transport, max_tries=3)

    def stop(self, index: int) -> None:
        self.gates[index].open.clear()
        self.handle.silence(self.replicas[index])

    def go_on(self, index: int) -> None:
        self.gates[index].open.set()
        self.handle.wake(self.replicas[index])

    def ask(self, count: int) -> list["asyncio.Task[Any]"]:
        params = SamplingParams(max_tokens=NUM_TOKENS)
        streams = [self.client.submit(Submission(f"r{i}", [1, 2], params)) for i in range(count)]
        return [asyncio.ensure_future(tokens(stream)) for stream in streams]


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SILENCE_S", "ANSWER_S"):
        monkeypatch.setattr(f"app.transport.silence.{name}", 0.1)
    monkeypatch.setattr("app.transport.silence.LOOK_S", 0.02)


@asynccontextmanager
async def two_replicas() -> AsyncIterator[Silent]:
    it = Silent()
    carriers = it.transport.carriers
    lose = carriers.lose

    def avoid_and_lose(names: frozenset[str]) -> None:
        it.handle.avoided = names  # as the router does
        lose(names)

    with patch.object(carriers, "lose", avoid_and_lose):
        watching = asyncio.ensure_future(watch(it.handle, it.pool, carriers))
        try:
            yield it
        finally:
            watching.cancel()
            for gate, replica in zip(it.gates, it.replicas, strict=True):
                gate.open.set()
                replica.close()


def names(it: Silent) -> list[str]:
    return [call[0] for call in it.handle.broadcasts]


async def test_streams_of_a_replica_that_says_nothing_go_on_at_one_that_does() -> None:
    async with two_replicas() as it:
        asked = it.ask(6)
        await until(lambda: all(gate.steps > 5 for gate in it.gates), 5)
        it.stop(0)
        answers = await asyncio.gather(*asked)
        assert [(len(ids), reason) for ids, reason in answers] == [(NUM_TOKENS, FinishReason.LENGTH)] * 6
        assert it.pool.silent == {"replica 0"}
        assert it.client.counts.resubmitted == 3
        assert it.client.counts.given_up == 0
        # When it goes on, nobody wants what it still has.
        made = it.replicas[0].stats().generation_tokens
        it.go_on(0)
        await until(lambda: it.pool.silent == frozenset(), 5)
        await until(lambda: it.replicas[0].stats().num_running == 0, 5)
        assert it.replicas[0].stats().generation_tokens <= made + 2 * 3, "what the step in flight made"


async def test_one_that_is_busy_for_long_keeps_its_requests() -> None:
    async with two_replicas() as it:
        asked = it.ask(2)
        await until(lambda: all(gate.steps > 5 for gate in it.gates), 5)
        it.gates[0].open.clear()  # a long step: its event loop answers
        await until(lambda: names(it).count("holding") >= 3, 5)
        it.gates[0].open.set()
        assert [len(ids) for ids, _ in await asyncio.gather(*asked)] == [NUM_TOKENS] * 2
        assert it.client.counts.resubmitted == 0


async def test_where_nobody_answers_nothing_is_given_up() -> None:
    async with two_replicas() as it:
        asked = it.ask(2)
        await until(lambda: all(gate.steps > 5 for gate in it.gates), 5)
        it.stop(0)
        it.stop(1)
        await until(lambda: names(it).count("holding") >= 3, 5)
        assert it.pool.silent == frozenset()
        it.go_on(0)
        it.go_on(1)
        assert [len(ids) for ids, _ in await asyncio.gather(*asked)] == [NUM_TOKENS] * 2


async def test_a_pause_that_ends_in_time_moves_nothing() -> None:
    async with two_replicas() as it:
        asked = it.ask(2)
        await until(lambda: all(gate.steps > 5 for gate in it.gates), 5)
        it.stop(0)
        await until(lambda: names(it).count("holding") == 1, 5)
        it.go_on(0)
        assert [len(ids) for ids, _ in await asyncio.gather(*asked)] == [NUM_TOKENS] * 2
        assert it.client.counts.resubmitted == 0


async def test_nobody_is_asked_while_tokens_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.transport.silence.SILENCE_S", 0.5)  # a busy machine says nothing for a while, too
    async with two_replicas() as it:
        for _ in range(6):
            await asyncio.gather(*it.ask(4))
        assert names(it) == []


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("kept", [0, NUM_TOKENS // 2])
async def test_a_request_whose_end_is_not_told_goes_on(monkeypatch: pytest.MonkeyPatch, kept: int, alone: bool) -> None:
    """kept: how many of its tokens still come. alone: else its carrier stays open for another one."""
    monkeypatch.setattr("app.transport.silence.CHECK_S", 0.05)
    async with two_replicas() as it:
        it.handle.avoided = ["replica 1"]
        deliver = it.transport._deliver
        came = 0

        def forgetful(output: StepOutput) -> None:
            nonlocal came
            came += output.request_ids.count("r0")
            if "r0" not in output.request_ids or came <= kept:
                deliver(replace(output, finished=[end for end in output.finished if end.request_id != "r0"]))

        monkeypatch.setattr(it.transport, "_deliver", forgetful)
        others = [] if alone else [Submission("other", [1, 2], SamplingParams(max_tokens=2 * NUM_TOKENS))]
        open_streams = [it.client.submit(other) for other in others]
        (asked,) = it.ask(1)
        if not alone:
            await until(lambda: came >= NUM_TOKENS, 5)
            it.gates[0].open.clear()
            it.handle.avoided = ["replica 0"]
        ids, reason = await asyncio.wait_for(asked, 5)
        assert (len(ids), reason) == (NUM_TOKENS, FinishReason.LENGTH)
        assert it.client.counts.resubmitted == 1
        for stream in open_streams:
            stream.close()


async def test_tokens_that_are_read_late_are_not_taken_for_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ingress with too much to do is seconds behind its engines: requests have ended there, and not here yet."""
    monkeypatch.setattr("app.transport.silence.CHECK_S", 0.05)
    reading, read = asyncio.Event(), LocalCall.__anext__
    reading.set()

    async def read_late(call: LocalCall) -> Any:
        await reading.wait()
        return await read(call)

    monkeypatch.setattr(LocalCall, "__anext__", read_late)
    async with two_replicas() as it:
        it.handle.avoided = ["replica 1"]
        carrier = it.client.submit(Submission("carrier", [1, 2], SamplingParams(max_tokens=2 * NUM_TOKENS)))
        asked = it.ask(3)
        await until(lambda: it.gates[0].steps > 20, 5)
        reading.clear()
        await until(lambda: it.replicas[0].holding().request_ids == {"carrier"}, 5)
        it.gates[0].open.clear()
        looks = names(it).count("holding")
        await until(lambda: names(it).count("holding") >= looks + 4, 5)
        reading.set()
        assert [len(ids) for ids, _ in await asyncio.gather(*asked)] == [NUM_TOKENS] * 3
        assert it.client.counts.resubmitted == 0
        carrier.close()


async def test_requests_under_way_are_looked_after_though_all_say_something(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.transport.silence.CHECK_S", 0.05)
    monkeypatch.setattr("app.transport.silence.SILENCE_S", 100.0)
    async with two_replicas() as it:
        assert [len(ids) for ids, _ in await asyncio.gather(*it.ask(4))] == [NUM_TOKENS] * 4
        assert "holding" in names(it)
        assert it.client.counts.resubmitted == 0


async def test_statistics_and_health_are_those_of_the_replicas_that_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.transport.broadcast.ask_all.__kwdefaults__", {"timeout_s": 0.1})
    async with two_replicas() as it:
        it.stop(0)
        assert len(await it.client.stats()) == 1
        await asyncio.wait_for(it.client.check_health(), 1)  # at the first good answer: after no time-out


@pytest.mark.parametrize("begun", [True, False])
async def test_requests_that_wait_for_a_replica_end_when_none_will_come(
    monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    """begun: they ran, and wait to go on; else the deployment was asleep."""
    monkeypatch.setattr("app.transport.silence.REFUSAL_S", 0.05)
    async with two_replicas() as it:
        asked = it.ask(4) if begun else []
        if begun:
            await until(lambda: all(gate.steps > 5 for gate in it.gates), 5)
        for replica in it.replicas:
            it.handle.kill(replica)
        it.pool.update([])
        asked = asked or it.ask(4)
        await until(lambda: len(it.handle.waiting) >= 4, 5)
        await asyncio.sleep(0.3)
        assert not any(task.done() for task in asked), "one may start"
        it.handle.deleted = True
        for answer in await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 5):
            assert type(answer) is EngineFault
        await until(lambda: not it.handle.waiting, 5)


async def test_a_request_that_comes_when_the_deployment_is_deleted_ends_at_once() -> None:
    async with two_replicas() as it:
        for replica in it.replicas:
            it.handle.kill(replica)
        it.handle.deleted = True
        (asked,) = it.ask(1)
        with pytest.raises(EngineFault, match="No engine is left"):
            await asyncio.wait_for(asked, 5)
        assert it.client.counts.resubmitted == 0


@pytest.fixture
def ranked() -> Any:
    from app.router import AffinityRouter

    router = AffinityRouter.__new__(AffinityRouter)
    router._pool = Pool()
    router._affinity = SimpleNamespace(rank=lambda _, __, busy: (sorted(busy), {}))
    router._busy = lambda _: None
    replicas = [SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in "abc"]
    return lambda: [replica.replica_id.unique_id for replica in router._ranked(replicas, None)], router._pool


def test_a_silent_replica_gets_nothing_while_there_are_others(ranked: Any) -> None:
    rank, pool = ranked
    pool.update("abc")
    assert rank() == ["a", "b", "c"]
    pool.set_silent("ab")
    assert rank() == ["c"]
    pool.set_silent("abc")
    assert rank() == ["a", "b", "c"]
    pool.update("bc")
    assert pool.silent == {"b", "c"}, "one that is gone is forgotten"


def test_the_queue_goes_by_those_that_take_requests() -> None:
    counts: list[int] = []
    pool = Pool()
    pool.update("abc")
    pool.follow(counts.append)
    for silent in ("a", "ab", "ab", "abc", ""):
        pool.set_silent(silent)
    pool.update("ab")
    pool.update("")
    assert counts == [3, 2, 1, 3, 2, 0]


async def test_one_that_waits_for_a_place_is_given_up_once_and_not_again_and_again() -> None:
    async with two_replicas() as it:
        asked = it.ask(2)
        await until(lambda: all(gate.steps > 5 for gate in it.gates), 5)
        it.stop(0)
        it.gates[1].open.clear()  # and the other one is long in a step
        await until(lambda: it.pool.silent == {"replica 0"}, 5)
        await until(lambda: names(it).count("holding") >= 6, 5)
        assert it.client.counts.resubmitted == 1
        it.gates[1].open.set()
        assert [len(ids) for ids, _ in await asyncio.gather(*asked)] == [NUM_TOKENS] * 2
