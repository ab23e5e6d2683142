"""Tool calls and thoughts over HTTP: scripted models that write them, in a stream and not."""

import json
import time
from typing import Any

import pytest
from openai import AsyncOpenAI

from app.openai.tools import Tool, calls_schema
from engine.text.tokenizer import Tokenizer
from tests.app.conftest import Serve
from tests.app.harness import Events, Server
from tests.app.http.test_http import error_of
from tests.app.openai.test_tool_parsers import form
from tests.tiny_models import CHAT_TEMPLATE, EOS_ID

TOOLS = [
    {"type": "function", "function": {"name": name, "description": "", "parameters": {"type": "object"}}}
    for name in ("add", "now", "get_weather")
]
CALLS = (("add", {"a": 1, "b": "é 🌶"}), ("now", {}))


def script(tokenizer: Tokenizer, text: str) -> list[int]:
    return [*tokenizer.encode(text, add_special_tokens=False), EOS_ID]


def folded(events: Events) -> dict[str, Any]:
    """The message that a client makes of a stream, as strictly as the official ones."""
    message: dict[str, Any] = {"content": "", "reasoning_content": ""}
    calls: dict[int, dict[str, Any]] = {}
    for chunk in events.chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["reasoning_content"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls", ()):
                if call["index"] not in calls:
                    assert call["index"] == len(calls)
                    assert call["type"] == "function"
                    assert call["function"]["name"]
                    calls[call["index"]] = {"id": call["id"], "name": call["function"]["name"], "arguments": ""}
                else:
                    assert "name" not in call["function"]
                calls[call["index"]]["arguments"] += call["function"]["arguments"]
    assert len({call["id"] for call in calls.values()}) == len(calls)
    return message | {"calls": [(call["name"], call["arguments"]) for call in calls.values()]}


async def both(server: Server, **body: Any) -> tuple[dict[str, Any], str]:
    """Message and finish reason, which must not depend on streaming."""
    whole = (await server.chat(**body)).json()["choices"][0]
    events = await server.stream_chat(**body)
    streamed = folded(events)
    message = whole["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    assert streamed["calls"] == calls
    assert streamed["content"] == (message["content"] or "")
    assert streamed["reasoning_content"] == message.get("reasoning_content", "")
    assert events.finish_reasons == [whole["finish_reason"]]
    assert events.done
    return message | {"calls": calls}, whole["finish_reason"]


@pytest.mark.parametrize("parser", ["hermes", "llama3_json", "mistral", "pythonic"])
async def test_calls_of_each_form_reach_the_client(scripted: Serve, tokenizer: Tokenizer, parser: str) -> None:
    text = form(parser, *CALLS)
    async with scripted(script(tokenizer, text), tool_call_parser=parser, max_model_len=1024, num_blocks=512) as server:
        message, reason = await both(server, tools=TOOLS)
        assert [(name, json.loads(arguments)) for name, arguments in message["calls"]] == list(CALLS)
        assert (message["content"], reason) == (None, "tool_calls")
        first, _ = await both(server, tools=TOOLS, parallel_tool_calls=False)
        assert [name for name, _ in first["calls"]] == ["add"]


async def test_without_tools_the_same_text_is_content(scripted: Serve, tokenizer: Tokenizer) -> None:
    text = form("hermes", *CALLS)
    async with scripted(script(tokenizer, text), max_model_len=1024, num_blocks=512) as server:
        for body in ({}, {"tools": TOOLS, "tool_choice": "none"}):
            message, reason = await both(server, **body)
            assert (message["content"], message["calls"], reason) == (text, [], "stop")


async def test_a_call_cut_by_the_limit_ends_with_length(scripted: Serve, tokenizer: Tokenizer) -> None:
    ids = script(tokenizer, form("hermes", *CALLS))
    async with scripted(ids, max_model_len=1024, num_blocks=512) as server:
        for limit in range(1, len(ids), 7):
            message, reason = await both(server, tools=TOOLS, max_tokens=limit)
            assert reason == "length"
            for _, arguments in message["calls"][:-1]:
                json.loads(arguments)


async def test_text_that_only_looks_like_a_call_is_kept(scripted: Serve, tokenizer: Tokenizer) -> None:
    text = "So: <tool_call>{'name': 'add'}</tool_call> or <tool_call>"
    async with scripted(script(tokenizer, text), max_model_len=1024, num_blocks=512) as server:
        message, reason = await both(server, tools=TOOLS)
        assert (message["content"], message["calls"], reason) == (text, [], "stop")


async def test_arguments_are_streamed_as_they_are_written(scripted: Serve, tokenizer: Tokenizer) -> None:
    ids = script(tokenizer, form("hermes", ("add", {"text": "many words that come one by one"})))
    options: dict[str, Any] = {"max_model_len": 1024, "num_blocks": 512}
    async with scripted(ids, before_step=lambda plan: time.sleep(0.002), **options) as server:
        events = await server.stream_chat(tools=TOOLS)
        deltas = [chunk["choices"][0]["delta"].get("tool_calls") for chunk in events.chunks]
        assert len([delta for delta in deltas if delta]) > 5


async def test_the_official_client_reads_calls(scripted: Serve, tokenizer: Tokenizer) -> None:
    ids = script(tokenizer, "One moment. " + form("hermes", *CALLS))
    async with scripted(ids, max_model_len=1024, num_blocks=512) as server:
        client = AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        messages: list[Any] = [{"role": "user", "content": "hello"}]
        options: dict[str, Any] = {"model": "tiny", "tools": TOOLS}
        whole = (await client.chat.completions.create(messages=messages, **options)).choices[0]
        assert whole.message.tool_calls is not None
        assert [call.function.name for call in whole.message.tool_calls] == ["add", "now"]
        async with client.chat.completions.stream(messages=messages, **options) as stream:
            final = (await stream.get_final_completion()).choices[0]
        assert final.message.tool_calls is not None
        assert [(call.function.name, call.function.arguments) for call in final.message.tool_calls] == [
            (call.function.name, call.function.arguments) for call in whole.message.tool_calls
        ]
        # And what it answered is a history that the server takes.
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": "3", "name": call.function.name}
            for call in whole.message.tool_calls
        ]
        history = [*messages, whole.message.model_dump(exclude_none=True), *results]
        assert (await client.chat.completions.create(messages=history, max_tokens=3, **options)).choices


@pytest.mark.parametrize("opened", [False, True])
async def test_thoughts_are_told_apart(scripted: Serve, tokenizer: Tokenizer, opened: bool) -> None:
    template = CHAT_TEMPLATE + ("{{ '<think>\n' }}" if opened else "") + "{# </think> #}"
    text = ("" if opened else "<think>\n") + "Let me see.\n</think>\n\nYes. " + form("hermes", ("now", {}))
    options = {"chat_template": template, "max_model_len": 1024, "num_blocks": 512}
    async with scripted(script(tokenizer, text), **options) as server:
        message, reason = await both(server, tools=TOOLS)
        assert (message["reasoning_content"], message["content"]) == ("Let me see.", "Yes.")
        assert (message["calls"], reason) == ([("now", "{}")], "tool_calls")
        message, reason = await both(server, max_tokens=4 if opened else 12)
        assert (message["content"], reason) == (None, "length")
    async with scripted(script(tokenizer, text), reasoning_parser="none", **options) as server:
        message, _ = await both(server)
        assert message["content"] == text


async def test_what_the_template_has_no_use_for_is_refused(scripted: Serve) -> None:
    async with scripted() as server:
        assert error_of(await server.chat(reasoning_effort="high"), 400)["param"] == "reasoning_effort"
        assert (await server.chat(reasoning_effort="none", max_tokens=1)).status_code == 200
        error = error_of(await server.chat(chat_template_kwargs={"messages": []}), 400)
        assert error["param"] == "chat_template_kwargs"
    template = CHAT_TEMPLATE + "{{ reasoning_effort }}{{ enable_thinking }}"
    async with scripted(chat_template=template) as server:
        tokens = [
            (await server.chat(max_tokens=1, **body)).json()["usage"]["prompt_tokens"]
            for body in ({}, {"reasoning_effort": "high"}, {"chat_template_kwargs": {"enable_thinking": False}})
        ]
        assert tokens[0] < min(tokens[1:])


async def test_a_final_message_is_continued(scripted: Serve) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, "}]
    async with scripted() as server:

        async def prompt_ids(**body: Any) -> list[int]:
            answer = await server.http.post("/tokenize", json={"messages": messages, **body})
            ids: list[int] = answer.json()["tokens"]
            return ids

        continued = await prompt_ids(continue_final_message=True)
        text = (await server.http.post("/detokenize", json={"tokens": continued})).json()["prompt"]
        assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nWell, "
        assert len(await prompt_ids(add_generation_prompt=False)) < len(await prompt_ids())
        response = await server.http.post(
            "/v1/chat/completions", json={"messages": messages, "continue_final_message": True, "max_tokens": 1}
        )
        assert response.json()["usage"]["prompt_tokens"] == len(continued)
        refused = await server.http.post(
            "/v1/chat/completions",
            json={"messages": messages, "continue_final_message": True, "add_generation_prompt": True},
        )
        error_of(refused, 400)


def test_the_schema_of_calls_keeps_each_tools_own() -> None:
    parameters = {
        "type": "object",
        "properties": {"child": {"$ref": "#/$defs/Node"}, "self": {"$ref": "#"}, "kind": {"enum": [{"$ref": "#"}]}},
        "$defs": {"Node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}}},
    }
    tools = [
        Tool.model_validate({"type": "function", "function": {"name": "walk", "parameters": parameters}}),
        Tool.model_validate({"type": "function", "function": {"name": "now"}}),
    ]
    schema = calls_schema(tools, at_most_one=True)
    walk = schema["$defs"]["walk"]
    assert (schema["minItems"], schema["maxItems"]) == (1, 1)
    assert walk["properties"]["child"] == {"$ref": "#/$defs/walk/$defs/Node"}
    assert walk["$defs"]["Node"]["properties"]["next"] == {"$ref": "#/$defs/walk/$defs/Node"}
    assert walk["properties"]["self"] == {"$ref": "#/$defs/walk"}
    assert walk["properties"]["kind"] == {"enum": [{"$ref": "#"}]}
    assert schema["$defs"]["now"] == {"type": "object", "properties": {}, "additionalProperties": False}
    assert [call["properties"]["name"] for call in schema["items"]["anyOf"]] == [{"const": "walk"}, {"const": "now"}]


@pytest.mark.parametrize(
    ("parameters", "extra"),
    [
        ({"type": "object", "properties": {"a": {"type": "string"}}}, {"additionalProperties": False}),
        ({"properties": {"a": {}}}, {"type": "object", "additionalProperties": False}),
        ({"type": "object", "additionalProperties": True}, {}),
        ({"anyOf": [{"required": ["a"]}]}, {"type": "object"}),
        ({"$ref": "#/$defs/A", "$defs": {"A": {"type": "object"}}}, {"type": "object"}),
    ],
)
def test_a_demanded_call_has_the_arguments_that_its_schema_names(
    parameters: dict[str, Any], extra: dict[str, Any]
) -> None:
    tool = Tool.model_validate({"type": "function", "function": {"name": "f", "parameters": parameters}})
    assert tool.function.arguments_schema() == parameters | extra
