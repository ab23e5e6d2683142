"""The API's shape over HTTP: bodies, streams, errors."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from engine.text.tokenizer import Tokenizer
from tests.app.conftest import Serve
from tests.tiny_models import BOS_ID, EOS_ID

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


def ids_of_length(length: int) -> list[int]:
    return [10 + i % 100 for i in range(length)]


async def test_a_chat_stream_has_openais_shape(scripted: Serve) -> None:
    async with scripted("hello there", max_num_seqs=4) as server:
        events = await server.stream_chat(max_tokens=6, stream_options={"include_usage": True})
        whole = (await server.chat(max_tokens=6)).json()
    first, *middle, last, usage = events.chunks
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert {chunk["object"] for chunk in events.chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in events.chunks}) == 1
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in [first, *middle])
    assert last["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 6
    assert all(chunk["usage"] is None for chunk in [first, *middle, last])
    assert events.done
    assert events.text == whole["choices"][0]["message"]["content"]
    assert whole["object"] == "chat.completion"
    assert whole["choices"][0]["message"]["role"] == "assistant"


async def test_a_stream_has_no_usage_unless_asked(scripted: Serve) -> None:
    async with scripted() as server:
        for events in (await server.stream_chat(max_tokens=3), await server.stream_complete(max_tokens=3)):
            assert all("usage" not in chunk and chunk["choices"] for chunk in events.chunks)
            assert len(events.finish_reasons) == 1


async def test_a_completion_stream_has_openais_shape(scripted: Serve) -> None:
    async with scripted("hello there") as server:
        events = await server.stream_complete(max_tokens=4)
        whole = (await server.complete(max_tokens=4)).json()
    assert {chunk["object"] for chunk in events.chunks} == {"text_completion"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in events.chunks}) == 1
    assert [chunk["choices"][0]["finish_reason"] for chunk in events.chunks[:-1]] == [None] * (len(events.chunks) - 1)
    assert events.finish_reasons == ["length"]
    assert events.text == whole["choices"][0]["text"]
    assert whole["object"] == "text_completion"


async def test_one_token_is_delivered_whole(scripted: Serve, tokenizer: Tokenizer) -> None:
    token = tokenizer.encode("the")[0]
    async with scripted([token]) as server:
        options: dict[str, Any] = {"max_tokens": 1, "stream_options": {"include_usage": True}}
        chat, completion = (await server.chat(max_tokens=1)).json(), (await server.complete(max_tokens=1)).json()
        streams = await server.stream_chat(**options), await server.stream_complete(**options)
    assert chat["choices"][0]["message"]["content"] == completion["choices"][0]["text"] == tokenizer.decode([token])
    for body, events in zip((chat, completion), streams, strict=True):
        assert events.text == tokenizer.decode([token])
        assert [body["choices"][0]["finish_reason"]] == events.finish_reasons == ["length"]
        assert body["usage"]["completion_tokens"] == events.usage["completion_tokens"] == 1


async def test_a_chat_without_a_limit_runs_to_eos_or_the_context(scripted: Serve, tokenizer: Tokenizer) -> None:
    async with scripted([*tokenizer.encode("a" * 40), EOS_ID]) as server:
        body = (await server.chat()).json()
        assert body["choices"][0]["finish_reason"] == "stop"
        assert body["choices"][0]["message"]["content"] == "a" * 40
        endless = (await server.chat(ignore_eos=True)).json()
    assert endless["choices"][0]["finish_reason"] == "length"
    assert endless["usage"]["total_tokens"] == 128


async def test_max_tokens_beyond_the_context_is_clamped(real: Serve) -> None:
    async with real() as server:
        prompt = ids_of_length(100)
        body = (await server.complete(prompt, max_tokens=10_000, ignore_eos=True)).json()
    assert body["usage"]["total_tokens"] == 128
    assert body["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_over_the_context_is_refused_with_true_numbers(real: Serve, stream: bool) -> None:
    async with real() as server:
        for length in (128, 129):
            error = error_of(await server.complete(ids_of_length(length), stream=stream), 400)
            assert error["code"] == "context_length_exceeded"
            assert str(length) in error["message"]
            assert "128" in error["message"]
        error = error_of(await server.chat("word " * 2000, stream=stream), 400)
        assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
        assert (await server.complete(ids_of_length(127))).status_code == 200


async def test_a_text_that_is_far_too_long_is_refused_unread(real: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    async with real() as server:
        monkeypatch.setattr(Tokenizer, "encode", None)
        for response, param in (
            (await server.complete("a" * 10**6), "prompt"),
            (await server.chat("a " * 10**6), "messages"),
        ):
            error = error_of(response, 400)
            assert (error["code"], error["param"]) == ("context_length_exceeded", param)
            assert "tokens or more" in error["message"]


async def test_a_request_larger_than_the_pool_is_clamped_and_the_one_behind_it_served(real: Serve) -> None:
    async with real(num_gpu_blocks_override=4, block_size=16) as server:
        large, small = await asyncio.gather(
            server.complete(ids_of_length(40), max_tokens=100, ignore_eos=True),
            server.complete("hi", max_tokens=2, ignore_eos=True),
        )
        assert large.json()["usage"]["total_tokens"] == 64
        assert small.json()["usage"]["completion_tokens"] == 2
        error = error_of(await server.complete(ids_of_length(64)), 400)
        assert error["code"] == "context_length_exceeded"
        await server.idle()


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], ["a", ""]])
async def test_an_empty_prompt_is_refused(scripted: Serve, prompt: Any) -> None:
    async with scripted() as server:
        assert error_of(await server.complete(prompt), 400)["param"] == "prompt"
        assert (await server.complete("hi")).status_code == 200


async def test_an_empty_prompt_is_bos_where_the_tokenizer_adds_it(scripted: Serve, tokenizer: Tokenizer) -> None:
    from tokenizers.processors import TemplateProcessing

    backend = tokenizer.hf.backend_tokenizer
    before = backend.post_processor
    backend.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    try:
        async with scripted([5]) as server:
            answers = [await server.complete(prompt, max_tokens=1, return_token_ids=True) for prompt in ("", [""])]
            error_of(await server.complete([]), 400)
    finally:
        backend.post_processor = before
    for body in (answer.json() for answer in answers):
        assert body["choices"][0]["prompt_token_ids"] == [BOS_ID]
        assert body["usage"]["prompt_tokens"] == 1


async def test_no_messages_is_refused(scripted: Serve) -> None:
    async with scripted() as server:
        assert error_of(await server.http.post(CHAT, json={"messages": []}), 400)["param"] == "messages"
        assert (await server.chat()).status_code == 200


async def test_what_a_chat_template_refuses_is_a_400(scripted: Serve, tokenizer: Tokenizer, monkeypatch: Any) -> None:
    async with scripted(chat_template="{{ raise_exception('users first') }}") as server:
        error = error_of(await server.chat(), 400)
        assert "users first" in error["message"]
        assert (await server.complete()).status_code == 200
    for unusable in (None, "{% for %}"):
        monkeypatch.setattr(tokenizer.hf, "chat_template", unusable)
        async with scripted() as server:
            assert "chat template" in error_of(await server.chat(), 400)["message"]
            assert (await server.complete()).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_limits_that_are_none_are_refused(scripted: Serve, stream: bool) -> None:
    async with scripted() as server:
        for value in (-1, 1.5, "5"):
            for name in ("max_tokens", "max_completion_tokens"):
                assert error_of(await server.chat(stream=stream, **{name: value}), 400)["param"] == name
            assert error_of(await server.complete(max_tokens=value, stream=stream), 400)["param"] == "max_tokens"
        assert error_of(await server.chat(max_tokens=0, stream=stream), 400)["param"] == "max_tokens"
        assert (await server.chat(max_tokens=1)).status_code == 200
        await server.idle()


async def test_completions_with_max_tokens_zero_make_no_token(scripted: Serve, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("some text")
    async with scripted() as server:
        for prompt in ("some text", ids):
            body = (await server.complete(prompt, max_tokens=0, echo=True)).json()
            assert body["choices"][0]["text"] == "some text"
            assert body["choices"][0]["finish_reason"] == "length"
            assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (len(ids), 0)
        assert (await server.complete("x", max_tokens=0)).json()["choices"][0]["text"] == ""
        events = await server.stream_complete("some text", max_tokens=0, echo=True)
        assert (events.text, events.finish_reasons, events.done) == ("some text", ["length"], True)
        assert server.replica.stats().steps == 0


async def test_echo_puts_the_prompt_before_the_text(scripted: Serve) -> None:
    async with scripted("abc") as server:
        body = (await server.complete("> ", max_tokens=1, echo=True)).json()
        events = await server.stream_complete("> ", max_tokens=1, echo=True)
    assert body["choices"][0]["text"] == events.text
    assert events.text.startswith("> a")


@pytest.mark.parametrize("prompts", [["one", "two and more", "three"], [[5, 6], [7, 8, 9], [10]]])
async def test_several_prompts_are_choices_by_index(real: Serve, prompts: Any) -> None:
    async with real() as server:
        alone = [(await server.complete(p, max_tokens=5, temperature=0)).json() for p in prompts]
        body = (await server.complete(prompts, max_tokens=5, temperature=0)).json()
        events = await server.stream_complete(
            prompts, max_tokens=5, temperature=0, stream_options={"include_usage": True}
        )
    expected = [one["choices"][0]["text"] for one in alone]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert [choice["text"] for choice in body["choices"]] == expected
    streamed = [""] * 3
    for chunk in events.chunks:
        for choice in chunk["choices"]:
            streamed[choice["index"]] += choice["text"]
    assert streamed == expected
    assert len(events.finish_reasons) == 3
    for usage in (body["usage"], events.usage):
        assert usage["prompt_tokens"] == sum(one["usage"]["prompt_tokens"] for one in alone)
        assert usage["completion_tokens"] == 15


async def test_token_ids_out_of_the_vocabulary_are_refused(real: Serve) -> None:
    async with real() as server:
        for stream in (False, True):
            for prompt in ([384], [-1], [1.5], [True], [5, 10**12], [[5], [384]], [[5], [-1]]):
                assert error_of(await server.complete(prompt, stream=stream), 400)["param"] == "prompt"
            for stop in ([384], [-1], [1.5], [5, 10**12]):
                response = await server.complete("a", stop_token_ids=stop, stream=stream)
                assert error_of(response, 400)["param"].split("[")[0] == "stop_token_ids"
        assert server.replica.stats().steps == 0
        assert (await server.complete([383])).status_code == 200


@pytest.mark.parametrize(("block_size", "cached"), [(0, 48), (16, 48), (32, 32)], ids=["default", "16", "32"])
async def test_cached_tokens_are_reported(real: Serve, block_size: int, cached: int) -> None:
    """By the hashes that the ingress makes, of blocks of the size that the engine has chosen."""
    async with real(block_size=block_size) as server:
        prompt = ids_of_length(50)
        cold, warm = [(await server.complete(prompt, temperature=0)).json() for _ in range(2)]
        forked = (await server.complete([*prompt[:16], *prompt[:20]])).json()
    assert forked["usage"]["prompt_tokens_details"] == {"cached_tokens": 0 if block_size == 32 else 16}
    assert cold["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert warm["usage"]["prompt_tokens_details"] == {"cached_tokens": cached}
    assert warm["choices"][0]["text"] == cold["choices"][0]["text"]


async def test_cached_tokens_are_reported_where_a_stop_string_ends_the_output(real: Serve) -> None:
    async with real(block_size=16) as server:
        prompt = ids_of_length(50)
        text = (await server.complete(prompt, temperature=0)).json()["choices"][0]["text"]
        options = {"temperature": 0, "stop": [text[4]]}
        body = (await server.complete(prompt, **options)).json()
        events = await server.stream_complete(prompt, stream_options={"include_usage": True}, **options)
    assert body["choices"][0]["finish_reason"] == "stop"
    for usage in (body["usage"], events.usage):
        assert usage["prompt_tokens_details"] == {"cached_tokens": 48}


async def test_a_salt_keeps_prefixes_apart(real: Serve) -> None:
    async with real(block_size=16) as server:
        prompt = ids_of_length(50)
        salts = ("a", "b", "a")
        cached = [
            (await server.complete(prompt, cache_salt=salt)).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            for salt in salts
        ]
    assert cached == [0, 0, 48]


async def test_models(scripted: Serve) -> None:
    async with scripted() as server:
        listed = (await server.http.get("/v1/models")).json()
        assert listed["object"] == "list"
        (card,) = listed["data"]
        assert (card["id"], card["object"], card["max_model_len"]) == ("tiny", "model", 128)
        assert (await server.http.get("/v1/models/tiny")).json() == card
        assert error_of(await server.http.get("/v1/models/org/other"), 404)["code"] == "model_not_found"


async def test_the_model_may_be_left_out_but_not_mistaken(scripted: Serve) -> None:
    async with scripted() as server:
        assert (await server.chat()).json()["model"] == "tiny"
        assert (await server.chat(model="tiny")).status_code == 200
        for stream in (False, True):
            assert error_of(await server.chat(model="other", stream=stream), 404)["code"] == "model_not_found"
            assert error_of(await server.complete(model="other", stream=stream), 404)["code"] == "model_not_found"


async def test_extra_fields_and_names_change_nothing(real: Serve) -> None:
    async with real() as server:
        plain = (await server.chat(max_tokens=5, temperature=0)).json()
        messages = [{"role": "user", "content": "hello", "name": "bob"}]
        extra = await server.http.post(
            CHAT, json={"messages": messages, "max_tokens": 5, "temperature": 0, "user": "u", "no_such_field": {"a": 1}}
        )
    assert extra.json()["choices"] == plain["choices"]
    assert extra.json()["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]


async def test_text_parts_make_the_same_prompt_as_their_join(scripted: Serve) -> None:
    async with scripted() as server:
        joined = (await server.chat("a\nb")).json()
        parts = (await server.chat([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])).json()
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        for stream in (False, True):
            refused = await server.chat([{"type": "text", "text": "a"}, image], stream=stream)
            assert error_of(refused, 400)["param"] == "messages[0].content"
        assert (await server.chat()).status_code == 200
    assert parts["usage"]["prompt_tokens"] == joined["usage"]["prompt_tokens"]
    # Found in the prefix cache up to its last full block: the same tokens.
    assert parts["usage"]["prompt_tokens_details"]["cached_tokens"] == joined["usage"]["prompt_tokens"] // 4 * 4


async def test_half_a_surrogate_pair_does_no_harm(scripted: Serve) -> None:
    async with scripted() as server:
        content = '{"messages":[{"role":"user","content":"\\ud83d"}],"stream":true}'
        error_of(await server.http.post(CHAT, content=content), 400)
        paired = '{"messages":[{"role":"user","content":"\\ud83d\\ude00"}]}'
        assert (await server.http.post(CHAT, content=paired)).status_code == 200


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/nothing", "/v2/chat/completions", "/v1/chat/completions/x"])
async def test_unknown_paths_have_openais_error(scripted: Serve, path: str) -> None:
    async with scripted() as server:
        assert error_of(await server.http.get(path), 404)["code"] == "not_found"
        assert error_of(await server.http.post(path, json={}), 404)["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("method", "path"), [("GET", CHAT), ("DELETE", COMPLETIONS), ("POST", "/v1/models"), ("PUT", "/health")]
)
async def test_other_methods_have_openais_error(scripted: Serve, method: str, path: str) -> None:
    async with scripted() as server:
        response = await server.http.request(method, path)
        assert error_of(response, 405)["code"] == "method_not_allowed"
        assert response.headers["allow"]


async def test_bodies_that_are_no_json_have_openais_error(scripted: Serve) -> None:
    async with scripted() as server:
        for content in (b"", b"{", b"null", b"\xff\xfe", b"[" * 50_000):
            error_of(await server.http.post(CHAT, content=content), 400)
        assert (await server.chat()).status_code == 200


async def test_a_body_that_is_too_large_is_a_413(scripted: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.http.streaming.MAX_BODY_BYTES", 1000)
    async with scripted() as server:
        assert error_of(await server.chat("x" * 2000), 413)["code"] == "body_too_large"


async def test_an_error_of_our_own_keeps_its_text_in_the_log(
    scripted: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with scripted() as server:
        monkeypatch.setattr("app.service.service.ChatFormat", lambda **_: 1 / 0)
        error = error_of(await server.chat(), 500)
        assert error["type"] == "server_error"
        assert "division" not in json.dumps(error)
        assert "division" in caplog.text
        assert (await server.complete()).status_code == 200


async def test_health_and_metrics(scripted: Serve) -> None:
    async with scripted("abcd") as server:
        await server.complete("hello", max_tokens=4)
        assert (await server.http.get("/health")).status_code == 200
        response = await server.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    values = {
        line.split("{")[0]: float(line.rsplit(" ", 1)[1])
        for line in response.text.splitlines()
        if not line.startswith("#")
    }
    assert values["vllm:generation_tokens_total"] == 4
    assert values["vllm:num_requests_running"] == values["vllm:num_requests_waiting"] == 0
    assert values["nanoserve:live_blocks"] == 0
    blocks = [values[f"nanoserve:{kind}_blocks"] for kind in ("live", "cached", "free")]
    assert sum(blocks) == 64
    assert 'model_name="tiny"' in response.text
