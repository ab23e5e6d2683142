"""Sampling parameters over HTTP: several outputs, penalties, biases and bans reach the engine as given."""

import asyncio
from typing import Any

import pytest

from engine.text.tokenizer import Tokenizer
from tests.app.conftest import Serve
from tests.app.harness import Events, until
from tests.app.http.test_http import error_of, ids_of_length
from tests.app.http.test_lifecycle import Gate


def texts_of(events: Events) -> list[str]:
    texts: dict[int, str] = {}
    for chunk in events.chunks:
        for choice in chunk["choices"]:
            text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            texts[choice["index"]] = texts.get(choice["index"], "") + text
    return [texts[index] for index in sorted(texts)]


@pytest.mark.parametrize("chat", [False, True])
async def test_n_outputs_are_those_of_n_seeds(real: Serve, chat: bool) -> None:
    async with real() as server:
        ask = server.chat if chat else server.complete
        stream = server.stream_chat if chat else server.stream_complete

        def text(choice: dict[str, Any]) -> str:
            found: str = choice["message"]["content"] if chat else choice["text"]
            return found

        body: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True}
        alone = [(await ask(seed=40 + i, **body)).json() for i in range(3)]
        whole = (await ask(n=3, seed=40, **body)).json()
        events = await stream(n=3, seed=40, stream_options={"include_usage": True}, **body)
        assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
        assert [text(choice) for choice in whole["choices"]] == [text(one["choices"][0]) for one in alone]
        assert texts_of(events) == [text(choice) for choice in whole["choices"]]
        assert len(events.finish_reasons) == 3
        for usage in (whole["usage"], events.usage):
            assert (usage["completion_tokens"], usage["prompt_tokens"]) == (18, alone[0]["usage"]["prompt_tokens"])
        await server.idle()


async def test_streams_of_several_outputs_interleave_and_open_each(real: Serve) -> None:
    async with real() as server:
        events = await server.stream_chat(n=4, max_tokens=8, ignore_eos=True)
    order = [chunk["choices"][0]["index"] for chunk in events.chunks]
    assert order != sorted(order)
    for index in range(4):
        first = next(c["choices"][0] for c in events.chunks if c["choices"][0]["index"] == index)
        assert first["delta"] == {"role": "assistant", "content": ""}


async def test_the_best_of_several_is_the_likeliest(real: Serve) -> None:
    async with real() as server:
        body: dict[str, Any] = {"max_tokens": 5, "seed": 3, "ignore_eos": True, "temperature": 1.5}
        every = (await server.complete("go", n=6, logprobs=0, **body)).json()["choices"]
        best = (await server.complete("go", n=2, best_of=6, **body)).json()
    mean = {choice["text"]: sum(choice["logprobs"]["token_logprobs"]) / 5 for choice in every}
    expected = sorted(mean, key=lambda text: -mean[text])[:2]
    assert [choice["text"] for choice in best["choices"]] == expected
    assert [choice["index"] for choice in best["choices"]] == [0, 1]
    assert best["choices"][0]["logprobs"] is None
    assert best["usage"]["completion_tokens"] == 30


async def test_biases_and_bans_are_kept(real: Serve, tokenizer: Tokenizer) -> None:
    async with real() as server:
        prompt = ids_of_length(8)
        plain = (await server.complete(prompt, temperature=0, max_tokens=6, return_token_ids=True)).json()
        first = plain["choices"][0]["token_ids"][0]

        async def ids(**body: Any) -> list[int]:
            response = await server.complete(
                prompt, temperature=0, max_tokens=6, return_token_ids=True, ignore_eos=True, **body
            )
            found: list[int] = response.json()["choices"][0]["token_ids"]
            return found

        assert set(await ids(logit_bias={"77": 100})) == {77}
        assert first not in await ids(logit_bias={str(first): -100})
        assert set(await ids(allowed_token_ids=[70, 71])) <= {70, 71}
        assert set(await ids(allowed_token_ids=[70])) == {70}
        word = tokenizer.decode([77])
        assert await ids(logit_bias={"77": 100}, bad_words=[word]) != [77] * 6
        repeated = await ids(logit_bias={"77": 5}, presence_penalty=2, frequency_penalty=2, repetition_penalty=2)
        assert repeated != await ids(logit_bias={"77": 5})


async def test_ids_beyond_the_vocabulary_are_refused(real: Serve) -> None:
    async with real() as server:
        for stream in (False, True):
            for name, value in (("logit_bias", {"384": 1}), ("allowed_token_ids", [384]), ("stop_token_ids", [384])):
                response = await server.complete("a", stream=stream, **{name: value})
                assert error_of(response, 400)["param"] == name


async def test_special_tokens_are_shown_if_asked(scripted: Serve) -> None:
    async with scripted([70, 1, 71]) as server:
        hidden = (await server.complete("a", max_tokens=3)).json()["choices"][0]["text"]
        shown = (await server.complete("a", max_tokens=3, skip_special_tokens=False)).json()["choices"][0]["text"]
    assert "<|im_start|>" in shown
    assert hidden == shown.replace("<|im_start|>", "")


async def test_a_request_of_priority_is_served_first(scripted: Serve) -> None:
    gate = Gate()
    async with scripted("a", max_num_seqs=1, capacity=8, before_step=gate) as server:
        gate.open.clear()
        order: list[int] = []

        async def ask(priority: int) -> None:
            await server.complete("a", max_tokens=20, ignore_eos=True, priority=priority)
            order.append(priority)

        tasks: list[asyncio.Future[None]] = []
        for priority in (0, 5, 9, -9):
            tasks.append(asyncio.ensure_future(ask(priority)))
            await until(lambda: server.admission.outstanding == len(tasks), 2)
        await asyncio.sleep(0.05)
        gate.open.set()
        await asyncio.gather(*tasks)
    assert order == [0, -9, 5, 9]
