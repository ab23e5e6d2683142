"""The client's dealings with a Serve handle, which is a stand-in here: errors, cancelling, aborts."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from app.engine_client import Delivery, Refusal, ServeEngineClient, Submission
from app.openai.errors import ApiError, EngineFault
from engine.outputs import Finished, FinishReason
from engine.sampling_params import SamplingParams

END = Delivery([2], Finished("a", FinishReason.STOP, 1, 2, 0))


class Response:
    def __init__(self, messages: Sequence[Any]) -> None:
        self._messages = messages
        self.cancelled = False

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._run()

    async def _run(self) -> AsyncIterator[Any]:
        for message in self._messages:
            if isinstance(message, Exception):
                raise message
            yield message

    def cancel(self) -> None:
        self.cancelled = True


class Broadcast:
    def __init__(self, answers: Any) -> None:
        self._answers = answers

    async def results_async(self, **_: Any) -> Any:
        if isinstance(self._answers, Exception):
            raise self._answers
        return self._answers


class Handle:
    """As much of a DeploymentHandle as the client uses."""

    def __init__(self, *messages: Any, answers: Any = ()) -> None:
        self.response = Response(messages)
        self.answers = answers
        self.broadcasts: list[tuple[Any, ...]] = []
        self.chosen: dict[str, Any] = {}
        self.submit = self

    def options(self, **options: Any) -> "Handle":
        self.chosen = options
        return self

    def remote(self, *_: Any) -> Response:
        return self.response

    def broadcast(self, *call: Any) -> Broadcast:
        self.broadcasts.append(call)
        return Broadcast(self.answers)


def submit(handle: Handle) -> Any:
    return ServeEngineClient(handle).submit(Submission("a", [1], SamplingParams()))


async def test_a_stream_that_ended_needs_no_abort() -> None:
    handle = Handle(Delivery([1]), END)
    stream = submit(handle)
    assert [delivery.token_ids async for delivery in stream] == [[1], [2]]
    stream.close()
    await asyncio.sleep(0)
    assert not handle.response.cancelled
    assert handle.broadcasts == []
    assert handle.chosen == {"stream": True, "_by_reference": False}


async def test_closing_early_cancels_the_call_and_aborts_by_id_once() -> None:
    handle = Handle(Delivery([1]), END)
    stream = submit(handle)
    async for _ in stream:
        break
    stream.close()
    stream.close()
    await asyncio.sleep(0)
    assert handle.response.cancelled
    assert handle.broadcasts == [("abort", "a")]


async def test_a_refusal_becomes_the_error_it_was() -> None:
    with pytest.raises(ApiError, match="too long") as caught:
        [_ async for _ in submit(Handle(Refusal("too long", "prompt", "context_length_exceeded")))]
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, "prompt", "context_length_exceeded")


async def test_a_lost_replica_is_a_fault() -> None:
    with pytest.raises(EngineFault, match="OSError"):
        [_ async for _ in submit(Handle(Delivery([1]), OSError("gone")))]
    with pytest.raises(EngineFault):
        [_ async for _ in submit(Handle(Delivery([1])))]


async def test_health_and_statistics_fail_as_faults() -> None:
    client = ServeEngineClient(Handle(answers=RuntimeError("no replica")))
    for ask in (client.check_health, client.stats):
        with pytest.raises(EngineFault):
            await ask()
    with pytest.raises(EngineFault):
        await ServeEngineClient(Handle(answers=[])).check_health()
    await ServeEngineClient(Handle(answers=[True])).check_health()
