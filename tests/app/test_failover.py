"""Requests whose replica is lost in their midst: the answer is the one of an undisturbed run."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.admission import Admission, Budget
from app.engine_client import ReplicaLost, Submission
from app.failover import FailoverClient, FailoverStream
from app.http.routes import create_app
from app.openai.errors import ApiError
from app.prompts.chat import ChatSide
from app.prompts.chat_template import chat_templates
from app.replica import EngineReplica
from app.service.adapters import Adapters
from app.service.catalog import Catalog
from app.service.service import Service
from app.transport.serve_client import ServeEngineClient
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import EngineDeadError
from engine.outputs import FinishReason
from engine.sampling_params import SamplingParams
from engine.step import StepPlan
from engine.step_loop import StepLoop
from engine.text.tokenizer import Tokenizer
from tests.app.harness import parse_events, until
from tests.app.http.test_lifecycle import Faults
from tests.app.local_handle import LocalCall, LocalHandle
from tests.scripted import ScriptedRunner
from tests.tiny_adapters import write_adapter

SCRIPT = list(range(5, 105))


@dataclass
class Pool:
    replicas: list[EngineReplica]
    handle: LocalHandle
    client: FailoverClient

    def made(self) -> int:
        return sum(replica.stats().generation_tokens for replica in self.replicas)

    def busiest(self) -> EngineReplica:
        return max(self.handle.replicas, key=lambda replica: replica.stats().num_running)

    async def kill_when(self, tokens: int) -> None:
        """Lose the replica that runs most, once so many tokens more have been made."""
        start = self.made()
        await until(lambda: self.made() >= start + tokens, 10)
        self.handle.kill(self.busiest())


@asynccontextmanager
async def pool(engines: list[Engine], max_tries: int = 3) -> AsyncIterator[Pool]:
    replicas = [EngineReplica(lambda on_output, e=engine: StepLoop(e, on_output)) for engine in engines]
    handle = LocalHandle(replicas)
    try:
        yield Pool(replicas, handle, FailoverClient(ServeEngineClient(handle), max_tries))
    finally:
        for replica in replicas:
            replica.close()


def scripted(step_ms: float = 2) -> Engine:
    """A resumed request begins its script again: only how many tokens there are says something."""
    return Engine(ScriptedRunner(SCRIPT, before_step=lambda _: time.sleep(step_ms / 1000)))


async def tokens(stream: FailoverStream) -> tuple[list[int], FinishReason | None]:
    ids, reason = [], None
    try:
        async for delivery in stream:
            ids += delivery.token_ids
            reason = delivery.finished.reason if delivery.finished else None
    finally:
        stream.close()
    return ids, reason


@asynccontextmanager
async def served(model_dir: Path, tokenizer: Tokenizer, replicas: int) -> AsyncIterator[tuple[httpx.AsyncClient, Pool]]:
    """The application over slow engines with a tiny model, of which some will be lost."""
    config = EngineConfig(
        model=str(model_dir), max_model_len=1024, num_gpu_blocks_override=128, num_threads=1, enable_lora=True
    )
    engines = [Engine.from_config(config) for _ in range(replicas)]
    for engine in engines:
        engine.runner.launch = _slowed(engine.runner.launch)
    async with pool(engines) as it:
        chat_side = ChatSide(chat_templates(tokenizer, None), "auto", "auto")
        adapters = Adapters("tiny", it.client)
        await adapters.load_all({"adapted": str(write_adapter(model_dir.parent / "adapter", model_dir))})
        limits, admission = await it.client.limits(), Admission(Budget(64), 64)
        service = Service("tiny", tokenizer, it.client, limits, admission, chat_side, adapters=adapters)
        transport = httpx.ASGITransport(create_app(Catalog([service]), 5.0))
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=30) as http:
            yield http, it


def _slowed(launch: Any) -> Any:
    def slow(plan: Any) -> Any:
        time.sleep(0.003)
        return launch(plan)

    return slow


GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": 40}
SEEDED: dict[str, Any] = {"temperature": 1.0, "seed": 7, "ignore_eos": True, "max_tokens": 40}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "required": ["a", "b"]}

REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "seeded": SEEDED,
    "narrowed": SEEDED | {"top_p": 0.9, "top_k": 50, "min_p": 0.01},
    "penalties": SEEDED | {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    "logprobs": SEEDED | {"logprobs": 3},
    "echo": GREEDY | {"logprobs": 2, "echo": True},
    "token ids": SEEDED | {"return_token_ids": True},
    "several choices": SEEDED | {"n": 3},
    "several prompts": SEEDED | {"prompt": ["hello", "good morning"]},
    "bias and bad words": SEEDED | {"logit_bias": {"70": 3, "71": 3}, "bad_words": ["th", " the"]},
    "structured": SEEDED | {"structured_outputs": {"json": SCHEMA}, "ignore_eos": False, "max_tokens": 120},
    "regex": SEEDED | {"structured_outputs": {"regex": "([a-f]{3}-){12}[0-9]{4}"}, "ignore_eos": False},
    "adapter": SEEDED | {"model": "adapted"},
    "min tokens": SEEDED | {"ignore_eos": False, "min_tokens": 36},
}


def content(response: httpx.Response) -> list[Any]:
    """An answer by its choices, whole or streamed, without what may differ: ids, times, where the cache had hits."""
    assert response.status_code == 200, response.text
    if not response.headers["content-type"].startswith("text/event-stream"):
        body = response.json()
        return [[_choice(choice) for choice in body["choices"]], body["usage"]["completion_tokens"]]
    events = parse_events(response)
    assert events.done, response.text[-500:]
    choices: dict[int, dict[str, Any]] = {}
    for chunk in events.chunks:
        for part in chunk["choices"]:
            choice = choices.setdefault(part["index"], {"text": "", "logprobs": [], "token_ids": []})
            choice["text"] += part["text"]
            choice["logprobs"] += (part["logprobs"] or {}).get("token_logprobs", [])
            choice["token_ids"] += part.get("token_ids", [])
            choice["finish_reason"] = part["finish_reason"]
    return [choices[index] for index in sorted(choices)]


def _choice(choice: dict[str, Any]) -> dict[str, Any]:
    logprobs = choice["logprobs"] or {}
    return {
        "text": choice["text"],
        "finish_reason": choice["finish_reason"],
        "token_ids": choice.get("token_ids"),
        "tokens": logprobs.get("tokens"),
        "logprobs": logprobs.get("token_logprobs"),
        "offsets": logprobs.get("text_offset"),
    }


def assert_same(found: Any, expected: Any) -> None:
    """Log probabilities within what a prompt computed at once may differ from tokens computed one by one."""
    if isinstance(expected, float):
        assert found == pytest.approx(expected, abs=1e-4)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected


@pytest.mark.parametrize("stream", [False, True])
async def test_the_answer_is_that_of_an_undisturbed_run(model_dir: Path, tokenizer: Tokenizer, stream: bool) -> None:
    """Of two losses: in its first tokens, and well into it."""
    async with served(model_dir, tokenizer, 3) as (http, it):
        for name, body in REQUESTS.items():
            body = {"prompt": "hello there", "stream": stream} | body
            expected = content(await http.post("/v1/completions", json=body))
            before = it.client.counts.resubmitted
            asked = asyncio.ensure_future(http.post("/v1/completions", json=body))
            await it.kill_when(2)
            await it.kill_when(12)
            found = content(await asked)
            assert_same(found, expected)
            assert it.client.counts.resubmitted >= before + 2, name
            it.handle.replicas += [replica for replica in it.replicas if replica not in it.handle.replicas]
        await until(lambda: all(call.ended for _, call in it.handle.calls), 2)
        assert all(replica.stats().live_blocks == 0 for replica in it.replicas)
        assert it.client.counts.given_up == 0
        assert 0 < it.client.counts.longest_pause_s < 5


async def test_a_request_without_a_seed_goes_on_by_the_one_that_the_ingress_drew(
    model_dir: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(model_dir, tokenizer, 2) as (http, it):
        body = {"prompt": "hello there", "stream": True} | SEEDED
        expected = content(await http.post("/v1/completions", json=body))
        monkeypatch.setattr("app.service.service._drawn_seed", lambda: SEEDED["seed"])
        asked = asyncio.ensure_future(http.post("/v1/completions", json=body | {"seed": None}))
        await it.kill_when(8)
        assert content(await asked) == expected
        assert it.client.counts.resubmitted == 1


async def test_a_stop_string_that_began_before_the_loss_is_found_after_it(
    model_dir: Path, tokenizer: Tokenizer
) -> None:
    async with served(model_dir, tokenizer, 2) as (http, it):
        body = {"prompt": "hello there", "stream": True} | SEEDED
        (whole,) = content(await http.post("/v1/completions", json=body))
        # Long enough to span many tokens, so that the loss falls within it and its beginning is held back.
        stop = whole["text"][3:-12]
        asked = asyncio.ensure_future(http.post("/v1/completions", json=body | {"stop": [stop]}))
        await it.kill_when(14)
        (found,) = content(await asked)
        assert it.client.counts.resubmitted == 1
        assert (found["text"], found["finish_reason"]) == (whole["text"][:3], "stop")


async def test_tool_calls_go_on_as_well(model_dir: Path, tokenizer: Tokenizer) -> None:
    async with served(model_dir, tokenizer, 2) as (http, it):
        tool = {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}
        body = {
            "messages": [{"role": "user", "content": "hello"}], "tools": [tool], "tool_choice": "required",
            "seed": 3, "temperature": 1.0, "max_tokens": 150,
        }  # fmt: skip

        async def call() -> tuple[str, Any, str]:
            response = await http.post("/v1/chat/completions", json=body)
            assert response.status_code == 200, response.text
            choice = response.json()["choices"][0]
            function = choice["message"]["tool_calls"][0]["function"]
            return function["name"], function["arguments"], choice["finish_reason"]

        expected = await call()
        asked = asyncio.ensure_future(call())
        await it.kill_when(8)
        assert await asked == expected
        assert it.client.counts.resubmitted == 1
        assert expected[0] == "look_up"


async def test_a_loss_before_the_first_token_is_invisible(model_dir: Path, tokenizer: Tokenizer) -> None:
    async with served(model_dir, tokenizer, 2) as (http, it):
        body = {"prompt": "hello there", "stream": True} | GREEDY
        expected = content(await http.post("/v1/completions", json=body))
        asked = asyncio.ensure_future(http.post("/v1/completions", json=body))
        await until(lambda: len(it.handle.calls) == 2, 2)
        it.handle.kill(it.handle.calls[-1][0])
        assert content(await asked) == expected
        assert it.client.counts.resubmitted == 1


async def test_an_engine_that_closes_with_requests_in_it_hands_them_on() -> None:
    async with pool([scripted(), scripted()]) as it:
        streams = [it.client.submit(Submission(f"r{i}", [1, 2], SamplingParams(max_tokens=60))) for i in range(4)]
        await until(lambda: it.made() > 20, 5)
        doomed = it.handle.replicas.pop(0)
        await asyncio.to_thread(doomed.close)
        assert [(len(ids), reason) for ids, reason in [await tokens(stream) for stream in streams]] == [
            (60, FinishReason.LENGTH)
        ] * 4
        assert it.client.counts.resubmitted == 2


async def test_tries_are_counted_only_while_they_bring_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.failover.FIRST_PAUSE_S", 0.001)
    async with pool([scripted() for _ in range(8)], max_tries=1) as it:
        stream = it.client.submit(Submission("a", [1, 2], SamplingParams(max_tokens=80)))
        asked = asyncio.ensure_future(tokens(stream))
        for _ in range(6):
            await it.kill_when(5)
        assert len((await asked)[0]) == 80
        assert (it.client.counts.resubmitted, it.client.counts.given_up) == (6, 0)


async def test_a_request_that_gets_nowhere_fails_after_its_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.failover.FIRST_PAUSE_S", 0.001)
    async with pool([scripted() for _ in range(8)], max_tries=2) as it:
        for replica in it.replicas:
            await asyncio.to_thread(replica.close)
        stream = it.client.submit(Submission("a", [1, 2], SamplingParams(max_tokens=80)))
        with pytest.raises(Exception, match="has been closed"):
            await tokens(stream)
        assert (it.client.counts.resubmitted, it.client.counts.given_up) == (2, 1)


async def test_one_that_kills_each_replica_in_its_first_decode_costs_as_many_as_it_has_tries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though each time it gets a token of its prompt first."""
    monkeypatch.setattr("app.failover.FIRST_PAUSE_S", 0.001)

    def poisoned() -> Engine:
        def before_step(plan: StepPlan) -> None:
            if plan.new_rows is None:
                raise EngineDeadError("killed")

        return Engine(ScriptedRunner(SCRIPT, before_step=before_step))

    async with pool([poisoned() for _ in range(8)], max_tries=3) as it:
        with pytest.raises(Exception, match=r"The engine replica was lost|the engine has stopped"):
            await tokens(it.client.submit(Submission("a", [1, 2], SamplingParams(max_tokens=80))))
        assert sum(replica.stats().generation_tokens for replica in it.replicas) == 4
        assert (it.client.counts.resubmitted, it.client.counts.given_up) == (3, 1)


async def test_one_that_is_given_up_mid_stream_gets_an_error_event(model_dir: Path, tokenizer: Tokenizer) -> None:
    async with served(model_dir, tokenizer, 2) as (http, it):
        it.client.max_tries = 0
        body = {"prompt": "hello there", "stream": True} | GREEDY
        asked = asyncio.ensure_future(http.post("/v1/completions", json=body))
        await it.kill_when(5)
        events = parse_events(await asked)
        assert events.names == ["error"]
        assert events.chunks[-1]["error"]["code"] == "engine_error"
        assert not events.done
        assert (await http.post("/v1/completions", json=body | {"max_tokens": 2})).status_code == 200


async def test_closing_between_two_tries_submits_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.failover.FIRST_PAUSE_S", 0.2)
    async with pool([scripted(10), scripted(10), scripted(10)]) as it:
        stream = it.client.submit(Submission("a", [1, 2], SamplingParams(max_tokens=80)))
        asked = asyncio.ensure_future(tokens(stream))
        for count in (1, 2):
            await until(lambda count=count: len(it.handle.calls) == count, 2)
            it.handle.kill(it.handle.calls[-1][0])
        await asyncio.sleep(0.05)
        asked.cancel()
        stream.close()
        await asyncio.sleep(0.3)
        assert len(it.handle.calls) == 2


async def test_a_stream_that_only_a_smaller_replica_is_left_for_ends_by_its_length() -> None:
    def before_step(plan: StepPlan) -> None:
        time.sleep(0.002)

    large = Engine(ScriptedRunner(SCRIPT, before_step=before_step))
    small = Engine(ScriptedRunner(SCRIPT, before_step=before_step, num_blocks=10))
    assert (large.info.max_total_tokens, small.info.max_total_tokens) == (128, 40)
    async with pool([large, small]) as it:
        stream = it.client.submit(Submission("a", [1, 2], SamplingParams(max_tokens=None)))
        asked = asyncio.ensure_future(tokens(stream))
        await until(lambda: it.made() > 50, 5)
        it.handle.kill(it.busiest())
        ids, reason = await asked
        assert 40 < len(ids) < 126
        assert reason is FinishReason.LENGTH
        with pytest.raises(ApiError, match="at most 40"):  # a prompt that does not fit is refused as ever
            await tokens(it.client.submit(Submission("b", [1] * 50, SamplingParams(max_tokens=1))))


async def test_a_step_that_fails_is_an_error_and_no_loss() -> None:
    """It may be the request that makes it fail: on another replica it would do so again."""

    def faulty() -> Engine:
        return Engine(ScriptedRunner(SCRIPT, before_step=Faults(5)))

    async with pool([faulty(), faulty()]) as it:
        ids, reason = await tokens(it.client.submit(Submission("a", [1, 2], SamplingParams(max_tokens=80))))
        assert (len(ids), reason) == (4, FinishReason.ERROR)
        assert it.client.counts.resubmitted == 0


class Distant(LocalCall):
    """A call whose messages and whose cancellation take a while to arrive."""

    async def __anext__(self) -> Any:
        message = await super().__anext__()
        await asyncio.sleep(DISTANCE_S)
        return message

    def cancel(self) -> None:
        asyncio.get_running_loop().call_later(DISTANCE_S, super().cancel)


DISTANCE_S = 0.05


@pytest.mark.parametrize("is_placed", [False, True])
async def test_one_placed_on_the_call_of_a_client_that_leaves_goes_on_and_is_not_blamed(
    monkeypatch: pytest.MonkeyPatch, is_placed: bool
) -> None:
    monkeypatch.setattr("tests.app.local_handle.LocalCall", Distant)
    async with pool([scripted()], max_tries=0) as it:
        (replica,) = it.replicas
        leaver = it.client.submit(Submission("leaver", [1, 2], SamplingParams(max_tokens=80)))
        if is_placed:
            await anext(leaver)
            leaver.close()
        await until(lambda: replica.stats().num_running == 1, 2)
        stream = it.client.submit(Submission("stays", [1, 2], SamplingParams(max_tokens=80)))
        if not is_placed:
            await until(lambda: replica.stats().num_running == 2, 2)
            leaver.close()
        assert len((await tokens(stream))[0]) == 80
        assert (it.client.counts.resubmitted, it.client.counts.given_up) == (1, 0)
        await until(lambda: not replica.stats().live_blocks, 2)


async def test_a_replica_that_is_lost_is_one_also_where_the_carriers_own_request_has_ended() -> None:
    async with pool([scripted()], max_tries=0) as it:
        carrier = it.client.submit(Submission("carrier", [1, 2], SamplingParams(max_tokens=5)))
        stream = it.client.submit(Submission("rider", [1, 2], SamplingParams(max_tokens=80)))
        assert len((await tokens(carrier))[0]) == 5
        it.handle.kill(it.replicas[0])
        with pytest.raises(ReplicaLost):
            await tokens(stream)
        assert (it.client.counts.resubmitted, it.client.counts.given_up) == (0, 1)
