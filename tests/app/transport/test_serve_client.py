"""The transport over two replicas: one carrier for each pair, addressing, aborts, losses. No Serve, no model."""

import asyncio
import gc
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from app.engine_client import Placed, ReplicaLost, Submission
from app.openai.errors import ApiError, EngineFault
from app.replica import EngineReplica
from app.transport.serve_client import ServeEngineClient
from app.transport.token_stream import ServeTokenStream
from engine.engine import Engine
from engine.errors import EngineDeadError
from engine.outputs import Finished, FinishReason, StepOutput
from engine.sampling_params import SamplingParams
from engine.step_loop import StepLoop
from tests.app.harness import until
from tests.app.http.test_lifecycle import Faults, Gate
from tests.app.local_handle import LocalHandle
from tests.scripted import ScriptedRunner

SCRIPT = [5, 6, 7, 8, 9, 10, 11, 12]


@dataclass
class Pool:
    replicas: list[EngineReplica]
    handle: LocalHandle
    client: ServeEngineClient

    def submit(self, name: str, max_tokens: int = 8, prompt_ids: Sequence[int] = (1, 2)) -> ServeTokenStream:
        return self.client.submit(Submission(name, list(prompt_ids), SamplingParams(max_tokens=max_tokens)))

    async def idle(self) -> None:
        def held() -> int:
            return sum(r.stats().num_running + r.stats().num_waiting + r.stats().live_blocks for r in self.replicas)

        await until(lambda: not held(), 2, lambda: f"{[replica.stats() for replica in self.replicas]}")
        await until(lambda: all(call.ended for _, call in self.handle.calls), 2)


@asynccontextmanager
async def pool(count: int = 2, **options: Any) -> AsyncIterator[Pool]:
    engines = [Engine(ScriptedRunner(SCRIPT, **options)) for _ in range(count)]
    replicas = [EngineReplica(lambda on_output, e=engine: StepLoop(e, on_output)) for engine in engines]
    handle = LocalHandle(replicas)
    try:
        yield Pool(replicas, handle, ServeEngineClient(handle))
    finally:
        for replica in replicas:
            replica.close()


async def read(stream: ServeTokenStream) -> list[int]:
    ids = [token_id async for delivery in stream for token_id in delivery.token_ids]
    stream.close()
    return ids


async def test_every_request_gets_its_own_tokens_over_one_carrier_a_replica() -> None:
    gate = Gate()
    gate.open.clear()
    async with pool(before_step=gate) as it:
        streams = [it.submit(f"r{i}", 2 + i % 7) for i in range(12)]
        await until(lambda: all(stream.placed for stream in streams), 2)
        carriers = [stream for stream in streams if stream.placed and stream.placed.carries]
        assert [stream.placed.replica for stream in carriers if stream.placed] == [
            stream.placed.replica for stream in streams[:2] if stream.placed
        ]
        gate.open.set()
        read_ids = await asyncio.gather(*(read(stream) for stream in streams))
        assert read_ids == [SCRIPT[: 2 + i % 7] for i in range(12)]
        await it.idle()
        assert not it.handle.broadcasts


async def test_an_idle_pair_has_no_call_open_and_the_next_request_carries_anew() -> None:
    async with pool(1) as it:
        for name in "ab":
            stream = it.submit(name)
            assert await read(stream) == SCRIPT
            await it.idle()
            assert stream.placed is not None
            assert stream.placed.carries
        assert len(it.handle.calls) == 2


@pytest.mark.parametrize("leaver", [0, 1, 2, 3])
async def test_one_that_leaves_is_aborted_where_it_is_and_no_other_loses_a_token(leaver: int) -> None:
    gate = Gate(0.002)
    async with pool(before_step=gate, max_model_len=1024, num_blocks=400) as it:
        streams = [it.submit(f"r{i}", 200) for i in range(4)]
        read_before = [len((await anext(stream)).token_ids) for stream in streams]
        del read_before[leaver]
        left = streams.pop(leaver)
        left.close()
        left.close()
        await until(lambda: sorted(r.stats().num_running for r in it.replicas) == [1, 2], 2)
        assert it.handle.broadcasts == ([("abort", f"r{leaver}")] if leaver < 2 else [])
        assert [len(await read(streams[i])) + read_before[i] for i in range(3)] == [200] * 3
        await it.idle()


async def test_the_last_one_of_a_pair_is_aborted_by_its_call_alone() -> None:
    async with pool(before_step=Gate(0.002)) as it:
        streams = [it.submit(f"r{i}", 100) for i in range(2)]
        for stream in streams:
            await anext(stream)
            stream.close()
        await it.idle()
        assert not it.handle.broadcasts


async def test_clients_that_leave_at_any_time_orphan_nothing() -> None:
    async with pool(before_step=Gate(0.001)) as it:
        for i in range(40):
            stream = it.submit(f"r{i}", 100)
            for _ in range(i % 8):
                await asyncio.sleep(0.0005 * (i % 5))
            stream.close()
        await it.idle()
        assert await read(it.submit("last")) == SCRIPT


async def test_a_refusal_becomes_the_error_it_was() -> None:
    async with pool() as it:
        with pytest.raises(ApiError) as caught:
            await read(it.submit("a", prompt_ids=[1] * 200))
        assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
        await it.idle()


async def test_a_replica_that_is_lost_loses_all_it_had_and_nothing_of_the_others() -> None:
    async with pool(before_step=Gate(0.002)) as it:
        streams = [it.submit(f"r{i}", 100) for i in range(6)]
        for stream in streams:
            await anext(stream)
        it.handle.kill(it.replicas[0])
        for stream in streams[::2]:
            with pytest.raises(ReplicaLost):
                await read(stream)
        assert [len(await read(stream)) > 50 for stream in streams[1::2]] == [True] * 3
        await it.idle()


async def test_a_carrier_that_breaks_alone_aborts_what_it_carried() -> None:
    """The replica lives on: what it still has of this ingress would run for nobody."""
    async with pool(1, before_step=Gate(0.002)) as it:
        streams = [it.submit(f"r{i}", 100) for i in range(3)]
        for stream in streams:
            await anext(stream)
        it.handle.calls[0][1].lose()
        for stream in streams:
            with pytest.raises(ReplicaLost):
                await read(stream)
        await it.idle()
        assert await read(it.submit("next")) == SCRIPT


async def test_the_calls_of_a_carrier_that_broke_end_though_another_carries_already() -> None:
    """Serve would count them as under way for as long as the ingress lives."""
    gate = Gate(0.002)
    async with pool(1, before_step=gate) as it:
        streams = [it.submit(f"r{i}", 100) for i in range(3)]
        for stream in streams:
            await anext(stream)
        gate.open.clear()
        await until(lambda: gate.is_held, 2)
        it.handle.calls[0][1].lose()
        await until(lambda: not it.replicas[0].holding().sent, 2)
        next_one = it.submit("next")
        await until(lambda: next_one.placed is not None, 2)
        gate.open.set()
        for stream in streams:
            with pytest.raises(ReplicaLost):
                await read(stream)
        assert await read(next_one) == SCRIPT
        await it.idle()


async def test_an_engine_that_is_closed_under_a_request_is_a_loss() -> None:
    async with pool(before_step=Gate(0.002)) as it:
        streams = [it.submit(f"r{i}", 100) for i in range(4)]
        for stream in streams:
            await anext(stream)
        await asyncio.to_thread(it.replicas[0].close)
        for stream in streams[::2]:
            with pytest.raises(ReplicaLost):
                await read(stream)
        with pytest.raises(EngineDeadError):
            await read(it.submit("late"))


async def test_an_engine_that_fails_ends_its_replica_after_the_requests_have_been_told() -> None:
    failed = asyncio.Event()
    engine = Engine(ScriptedRunner(SCRIPT, before_step=Faults(*range(3, 20))))
    replica = EngineReplica(lambda on_output: StepLoop(engine, on_output), failed.set)
    client = ServeEngineClient(LocalHandle([replica]))
    for i in range(3):
        assert not failed.is_set()
        stream = client.submit(Submission(f"r{i}", [1], SamplingParams(max_tokens=8)))
        if i < 2:  # its own fault, for all the engine knows
            assert [delivery.finished async for delivery in stream][-1].reason is FinishReason.ERROR
        else:
            with pytest.raises(ReplicaLost):
                await read(stream)
    await asyncio.wait_for(failed.wait(), 2)


async def test_a_client_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.transport.token_stream.MAX_UNREAD_TOKENS", 16)
    async with pool(before_step=Gate(0.001)) as it:
        stream = it.submit("a", 120)
        await it.idle()
        with pytest.raises(EngineFault, match="does not read"):
            await read(stream)
        assert sum(replica.stats().generation_tokens for replica in it.replicas) < 100


async def test_two_ingresses_have_a_carrier_each() -> None:
    async with pool(1, before_step=Gate(0.001)) as it:
        other = Pool(it.replicas, LocalHandle(it.replicas), ServeEngineClient(LocalHandle(it.replicas)))
        mine, theirs = [it.submit(f"m{i}") for i in range(3)], [other.submit(f"t{i}") for i in range(3)]
        assert await asyncio.gather(*(read(stream) for stream in mine + theirs)) == [SCRIPT] * 6
        placed = [stream.placed for stream in mine + theirs]
        assert [where.carries for where in placed if where] == [True, False, False] * 2
        assert len({where.carrier for where in placed if where}) == 2


async def test_tokens_may_come_before_the_word_of_where_they_come_from() -> None:
    """Two calls are two connections: nothing says which of their messages is read first."""
    async with pool(1) as it:
        stream = it.submit("a")
        it.client._deliver(StepOutput(["a"], [5], [Finished("a", FinishReason.LENGTH, 2, 1, 0)]))
        assert await read(stream) == [5]
        it.client.carriers.place(stream, Placed("somewhere", 1, False))
        assert not it.client.carriers._placed


async def test_health_and_statistics() -> None:
    async with pool(before_step=Gate(0.001)) as it:
        await it.client.check_health()
        assert len(await it.client.stats()) == 2
        it.replicas[0].close()
        await it.client.check_health()
        it.replicas[1].close()
        with pytest.raises(EngineFault):
            await it.client.check_health()
        it.handle.replicas.clear()
        assert await it.client.stats() == []


async def test_leaving_when_no_replica_is_left_raises_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with pool() as it:
        stream = it.submit("a", 100)
        it.handle.kill(it.replicas[0])
        it.handle.broadcast = lambda *_: 1 / 0
        stream.close()
        await asyncio.sleep(0.01)
        gc.collect()
        assert "never retrieved" not in caplog.text
