"""Random lives of requests through HTTP: good and bad ones, streams read to the end or left; nothing stays behind."""

import asyncio
import contextlib
import random
from typing import Any

import httpx
import pytest

from tests.app.conftest import Serve
from tests.app.harness import Server, parse_events

PROMPTS = ("hello", "she sells sea shells", "one, two, three, " * 4, "the quick brown fox " * 3, [5, 6, 7, 300])
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
WISHES: tuple[dict[str, Any], ...] = (
    {"stop": ["e", "\n"]},
    {"stop": ["never in the text"]},
    {"n": 3},
    {"logprobs": 2},
    {"echo": True},
    {"temperature": 1.0, "seed": 3, "top_p": 0.9, "top_k": 20},
    {"structured_outputs": {"json": SCHEMA}},
    {"structured_outputs": {"regex": "[a-c]{2}-[0-9]+"}},
    {"frequency_penalty": 0.7, "presence_penalty": -0.3},
    {"logit_bias": {"70": 5}, "bad_words": ["th"]},
    {"min_tokens": 4},
    {"stream_options": {"include_usage": True}},
    {"service_tier": "flex"},
    {"priority": 2},
)
FAULTS: tuple[dict[str, Any], ...] = (
    {"max_tokens": -1},
    {"temperature": "hot"},
    {"n": 0},
    {"prompt": ["hello", 5]},
    {"structured_outputs": {"regex": "(("}},
    {"prompt": [10**9]},
    {"prompt": "long " * 400},
    {"unknown_field": 1, "logprobs": 99},
)
SETTINGS: dict[str, dict[str, Any]] = {
    "few blocks": {"num_gpu_blocks_override": 14, "max_num_seqs": 6, "max_num_batched_tokens": 32},
    "two steps in flight": {"async_scheduling": True, "max_num_seqs": 8},
}


class Client:
    """What one client does, one request after another."""

    def __init__(self, server: Server, seed: int) -> None:
        self.server, self.random = server, random.Random(seed)

    async def live(self, requests: int) -> None:
        for _ in range(requests):
            body = self.body()
            if self.random.random() < 0.15:
                response = await self.post(body | self.random.choice(FAULTS))
                assert response.status_code == 400, (response.text, body)
            elif self.random.random() < 0.5:
                await self.leave(body)
            else:
                await self.read(body)

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {"prompt": self.random.choice(PROMPTS), "temperature": 0}
        body["max_tokens"] = self.random.choice((1, 5, 20, 60))
        body["stream"] = self.random.random() < 0.6
        for wish in self.random.sample(WISHES, self.random.choice((0, 1, 1, 2))):
            body |= wish
        if not body["stream"]:
            body.pop("stream_options", None)
        return body

    async def read(self, body: dict[str, Any]) -> None:
        response = await self.post(body)
        if response.status_code == 400:  # wishes that do not go together
            assert response.json()["error"]["message"]
            return
        assert response.status_code == 200, (response.text, body)
        if body["stream"]:
            events = parse_events(response)
            assert events.done, body
            assert not events.names, (response.text, body)
            reasons = events.finish_reasons
        else:
            reasons = [choice["finish_reason"] for choice in response.json()["choices"]]
        assert len(reasons) == body.get("n", 1), (reasons, body)
        assert set(reasons) <= {"stop", "length"}

    async def leave(self, body: dict[str, Any]) -> None:
        """After some lines, or after some milliseconds, in which the request may not have begun."""
        lines, patience = self.random.choice((1, 3, 10)), self.random.choice((None, 0.002, 0.02, 0.1))

        async def read_some() -> None:
            async with self.server.http.stream("POST", "/v1/completions", json=body) as response:
                left = lines
                async for _ in response.aiter_lines():
                    left -= 1
                    if not left:
                        return

        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(read_some(), patience)

    async def post(self, body: dict[str, Any]) -> httpx.Response:
        return await asyncio.wait_for(self.server.http.post("/v1/completions", json=body), 30)


@pytest.mark.parametrize("name", SETTINGS)
async def test_nothing_stays_behind_and_the_next_answer_is_right(real: Serve, name: str) -> None:
    question = {"temperature": 0, "max_tokens": 30, "ignore_eos": True, "logprobs": 1}
    async with real(max_model_len=192, capacity=6, max_waiting=64, **SETTINGS[name]) as server:
        before = [(await server.complete(prompt, **question)).json()["choices"] for prompt in PROMPTS]
        clients = [Client(server, seed) for seed in range(8)]
        await asyncio.gather(*(client.live(12) for client in clients))
        stats = await server.idle(within_s=5.0)
        assert stats.waiting_tokens == stats.slots_used == 0
        assert server.engine.scheduler.batch.num_free_rows == server.engine.info.max_num_seqs
        after = [(await server.complete(prompt, **question)).json()["choices"] for prompt in PROMPTS]
        assert [choices[0]["text"] for choices in after] == [choices[0]["text"] for choices in before]
        await server.idle()
