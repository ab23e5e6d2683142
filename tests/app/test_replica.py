"""The engine replica without Serve: streams, aborts, resumption, refusals, health."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from app.engine_client import Message, Placed, Refusal, Submission
from app.replica import EngineReplica
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import EngineDeadError
from engine.outputs import FinishReason, StepOutput
from engine.sampling_params import SamplingParams
from engine.step_loop import StepLoop
from tests.app.harness import until
from tests.app.http.test_lifecycle import Faults, Gate
from tests.live_server import REPOSITORY
from tests.scripted import ScriptedRunner

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


@contextmanager
def replica_of(engine: Engine) -> Iterator[EngineReplica]:
    replica = EngineReplica(lambda on_output: StepLoop(engine, on_output))
    try:
        yield replica
    finally:
        replica.close()


def scripted(**options: Any) -> Engine:
    return Engine(ScriptedRunner([5, 6, 7, 8, 9], **options))


async def tokens(messages: AsyncIterator[Message]) -> tuple[list[int], FinishReason | None]:
    """What a call that carries nobody else's tokens brings."""
    ids: list[int] = []
    reason = None
    async for message in messages:
        if isinstance(message, Placed):
            assert message.carries
            continue
        assert isinstance(message, StepOutput), message
        assert reason is None, "a message after the end"
        ids += message.token_ids
        reason = message.finished[0].reason if message.finished else None
    return ids, reason


async def first_tokens(messages: AsyncIterator[Message]) -> list[int]:
    assert isinstance(await anext(messages), Placed)
    output = await anext(messages)
    assert isinstance(output, StepOutput)
    return output.token_ids


async def test_tokens_then_the_end() -> None:
    with replica_of(scripted()) as replica:
        params = SamplingParams(max_tokens=4)
        assert await tokens(replica.submit(Submission("a", [1, 2], params), "ingress")) == (
            [5, 6, 7, 8],
            FinishReason.LENGTH,
        )
        assert replica.stats().live_blocks == 0


async def test_a_step_wakes_the_event_loop_once_for_all_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    wakes = []
    wake = loop.call_soon_threadsafe

    def counted(callback: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(callback, "__name__", "") == "_deliver":
            wakes.append(args[0])
        return wake(callback, *args, **kwargs)

    monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
    with replica_of(scripted(max_num_batched_tokens=64)) as replica:
        submissions = [Submission(name, [1, 2], SamplingParams(max_tokens=10)) for name in "abcdefgh"]
        await asyncio.gather(*(tokens(replica.submit(submission, submission.request_id)) for submission in submissions))
        assert len(wakes) <= replica.stats().steps
    assert max(len(output.token_ids) for output in wakes) > 1


async def test_a_request_goes_on_after_the_tokens_it_brings(model_dir: Path) -> None:
    config = EngineConfig(
        model=str(model_dir), dtype="float32", max_model_len=128, num_gpu_blocks_override=32, num_threads=1
    )
    with replica_of(Engine.from_config(config)) as replica:
        for params in (GREEDY, SamplingParams(seed=3, max_tokens=20, ignore_eos=True)):
            whole, _ = await tokens(replica.submit(Submission("whole", [5, 6, 7], params), "ingress"))
            resumed = Submission("rest", [5, 6, 7], params, output_ids=whole[:8])
            assert await tokens(replica.submit(resumed, "ingress")) == (whole[8:], FinishReason.LENGTH)


PROCESS_OF_THE_ENGINE = """
import asyncio, sys
import app.engine_deployment
from app.engine_client import Submission
from app.replica import EngineReplica
from engine.config import EngineConfig
from engine.engine import Engine
from engine.outputs import StepOutput
from engine.sampling_params import SamplingParams
from engine.step_loop import StepLoop
from engine.structured.spec import StructuredOutputSpec
from engine.text.tokenizer import Tokenizer

Tokenizer.encode = Tokenizer.decode = Tokenizer.format_chat = Tokenizer.apply_chat_template = None

async def main():
    config = EngineConfig(
        model=sys.argv[1], dtype="float32", max_model_len=128, num_gpu_blocks_override=32, num_threads=1
    )
    engine = Engine.from_config(config)
    replica = EngineReplica(lambda on_output: StepLoop(engine, on_output))
    ids = []
    for i, more in enumerate(({"logprobs": 2}, {"structured_outputs": StructuredOutputSpec(regex="[ab]{9}")})):
        params = SamplingParams(max_tokens=4, ignore_eos=True, **more)
        async for message in replica.submit(Submission(str(i), [1, 2], params), "ingress"):
            ids += message.token_ids if isinstance(message, StepOutput) else []
    replica.close()
    print(len(ids), *(name for name in sys.modules if name.startswith((
        "app.http", "app.ingress", "app.prompts", "app.service", "app.openai.chat_request", "engine.text.detokenizer",
        "engine.text.token_text", "starlette"))))

asyncio.run(main())
"""


def test_the_process_of_the_engine_makes_no_text_and_reads_none(model_dir: Path) -> None:
    """Where a form is asked for, it reads what bytes the tokens stand for, and nothing else of the tokenizer."""
    command = [sys.executable, "-c", PROCESS_OF_THE_ENGINE, str(model_dir)]
    ran = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["8"]


@pytest.mark.parametrize("how", ["close", "cancel", "id"])
async def test_an_abort_frees_the_request(how: str) -> None:
    with replica_of(scripted(before_step=Gate(0.002))) as replica:
        stream = replica.submit(Submission("a", [1, 2], SamplingParams(max_tokens=100)), "ingress")
        await first_tokens(stream)
        if how == "close":
            await stream.aclose()
        elif how == "cancel":
            reader = asyncio.ensure_future(tokens(stream))
            await asyncio.sleep(0)
            reader.cancel()
        else:
            replica.abort("a")
            replica.abort("a")
            assert (await tokens(stream))[1] is FinishReason.ABORT
        await until(lambda: replica.stats().num_running == replica.stats().live_blocks == 0, 1)


async def test_an_abort_may_arrive_before_its_request() -> None:
    with replica_of(scripted()) as replica:
        replica.abort("late")
        assert await tokens(replica.submit(Submission("late", [1], SamplingParams()), "ingress")) == (
            [],
            FinishReason.ABORT,
        )


async def test_refusals_are_data() -> None:
    with replica_of(scripted()) as replica:

        async def refusal(**changes: Any) -> Refusal:
            fields: dict[str, Any] = {"request_id": "a", "prompt_ids": [1], "params": SamplingParams()} | changes
            (message,) = [message async for message in replica.submit(Submission(**fields), "ingress")]
            assert isinstance(message, Refusal)
            return message

        assert (await refusal(prompt_ids=[1] * 128)).code == "context_length_exceeded"
        assert (await refusal(prompt_ids=[400])).param == "prompt"
        assert (await refusal(params=SamplingParams(stop_token_ids=[400]))).param == "stop_token_ids"
        assert (await tokens(replica.submit(Submission("a", [1], SamplingParams(max_tokens=1)), "ingress")))[0] == [5]


async def test_an_id_in_use_is_refused_and_its_owner_undisturbed() -> None:
    with replica_of(scripted(before_step=Gate(0.002))) as replica:
        owner = replica.submit(Submission("a", [1, 2], SamplingParams(max_tokens=10)), "ingress")
        first = await first_tokens(owner)
        (message,) = [message async for message in replica.submit(Submission("a", [1], SamplingParams()), "ingress")]
        assert isinstance(message, Refusal)
        rest, reason = await tokens(owner)
        assert (len(first + rest), reason) == (10, FinishReason.LENGTH)


async def test_what_waits_for_a_reader_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.transport.outbox.MAX_UNREAD_TOKENS", 8)
    with replica_of(scripted()) as replica:
        stream = replica.submit(Submission("a", [1], SamplingParams(max_tokens=100)), "ingress")
        first = await first_tokens(stream)
        await until(lambda: replica.stats().num_running == 0, 2)
        ids, reason = await tokens(stream)
        assert reason is FinishReason.ABORT
        assert 8 <= len(first + ids) < 100


async def test_a_stalled_engine_is_unhealthy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.replica.MAX_STALL_S", 0.05)
    gate = Gate()
    with replica_of(scripted(before_step=gate)) as replica:
        replica.check_health()
        gate.open.clear()
        reader = asyncio.ensure_future(
            tokens(replica.submit(Submission("a", [1], SamplingParams(max_tokens=3)), "ingress"))
        )
        await asyncio.sleep(0.2)
        with pytest.raises(EngineDeadError):
            replica.check_health()
        gate.open.set()
        assert (await reader)[1] is FinishReason.LENGTH
        replica.check_health()


async def test_a_dead_engine_ends_its_streams_and_takes_no_more() -> None:
    with replica_of(scripted(before_step=Faults(*range(1, 10)))) as replica:
        for _ in range(3):
            assert (await tokens(replica.submit(Submission("a", [1], SamplingParams()), "ingress")))[
                1
            ] is FinishReason.ERROR
        await asyncio.sleep(0.05)
        with pytest.raises(EngineDeadError):
            replica.check_health()
        with pytest.raises(EngineDeadError):
            await anext(replica.submit(Submission("b", [1], SamplingParams()), "ingress"))
