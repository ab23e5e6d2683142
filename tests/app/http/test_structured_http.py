"""Output that is held to a form, and tool calls that are demanded, over HTTP with a random model."""

import json
import re
from typing import Any

import jsonschema
import pytest

from tests.app.conftest import Serve
from tests.app.harness import Server
from tests.app.http.test_http import error_of
from tests.app.openai.test_tools import both

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "store", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
BAD_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": 5}}}
ROOM: dict[str, Any] = {"max_model_len": 1024, "num_gpu_blocks_override": 256}


async def texts(server: Server, **body: Any) -> list[tuple[str, str]]:
    """Texts and finish reasons of several outputs, from a chat and a completion, in a stream and not."""
    body = {"temperature": 1.0, "seed": 1, "max_tokens": 200} | body
    chat = (await server.chat(n=3, **body)).json()["choices"]
    found = [(choice["message"]["content"], choice["finish_reason"]) for choice in chat]
    completion = (await server.complete(n=3, **body)).json()["choices"]
    found += [(choice["text"], choice["finish_reason"]) for choice in completion]
    events = await server.stream_chat(**body)
    assert (events.text, events.finish_reasons[0]) == found[0]
    await server.idle()
    return found


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "strict": True, "schema": SCHEMA}}},
        {"structured_outputs": {"json": SCHEMA}},
        {"guided_json": SCHEMA},
    ],
)
async def test_output_fits_the_schema(real: Serve, body: dict[str, Any]) -> None:
    async with real(**ROOM) as server:
        for text, reason in await texts(server, **body):
            assert not re.search(r"\s{40}", text)
            assert reason == "stop"
            jsonschema.validate(json.loads(text), SCHEMA)


async def test_any_json_object_parses_if_it_ends(real: Serve) -> None:
    async with real(**ROOM) as server:
        found = await texts(server, response_format={"type": "json_object"}, max_tokens=400)
        for text, reason in found:
            assert not re.search(r"\s{40}", text)
            assert text.lstrip().startswith("{")
            if reason == "stop":
                assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": "[0-9]{3}-[ab]+!"}, r"[0-9]{3}-[ab]+!"),
        ({"choice": ["yes", "no", "né"]}, "yes|no|né"),
        ({"grammar": 'start: "a" /b{2,4}/ "c"'}, "ab{2,4}c"),
        ({"grammar": 'root ::= "x" ("y" | "z")'}, "x[yz]"),
    ],
)
async def test_output_matches(real: Serve, form: dict[str, Any], pattern: str) -> None:
    async with real(**ROOM) as server:
        for text, reason in await texts(server, structured_outputs=form):
            assert reason == "length" or re.fullmatch(pattern, text)


@pytest.mark.parametrize("parallel", [True, False])
async def test_a_required_call_is_made(real: Serve, parallel: bool) -> None:
    async with real(**ROOM) as server:
        for seed in range(4):
            body = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": parallel, "seed": seed}
            message, reason = await both(server, max_tokens=400, **body)
            assert message["calls"]
            if reason != "length":
                assert reason == "tool_calls"
                assert message["content"] is None
                for name, arguments in message["calls"]:
                    jsonschema.validate(json.loads(arguments), SCHEMA if name == "store" else {"maxProperties": 0})
            if not parallel:
                assert len(message["calls"]) == 1


async def test_a_named_call_is_made(real: Serve) -> None:
    async with real(**ROOM) as server:
        choice = {"type": "function", "function": {"name": "store"}}
        message, reason = await both(server, tools=TOOLS, tool_choice=choice, max_tokens=200, seed=1)
        ((name, arguments),) = message["calls"]
        assert (name, reason, message["content"]) == ("store", "tool_calls", None)
        jsonschema.validate(json.loads(arguments), SCHEMA)
        message, reason = await both(server, tools=TOOLS, tool_choice=choice, max_tokens=4, seed=1)
        assert reason == "length"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "body",
    [
        {"structured_outputs": {"regex": "("}}, {"structured_outputs": {"regex": "(?=a)b"}},
        {"guided_json": {"type": "nothing"}}, {"structured_outputs": {"grammar": "no rules"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#/no"}}}},
        {"tools": [BAD_TOOL], "tool_choice": "required"},
    ],
)  # fmt: skip
async def test_a_form_that_cannot_be_held_is_refused_before_the_engine(
    scripted: Serve, body: dict[str, Any], stream: bool
) -> None:
    async with scripted(max_model_len=1024, num_blocks=512) as server:
        error = error_of(await server.chat(stream=stream, **body), 400)
        assert error["param"].split(".")[0] in body
        assert server.replica.stats().steps == 0
        assert (await server.chat(max_tokens=1)).status_code == 200
