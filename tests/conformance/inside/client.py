"""The official Python client against the server; one JSON object a line for each case.

python client.py SERVER MODEL
"""

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any, Literal

import openai
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

SERVER, MODEL = sys.argv[1:]
client = OpenAI(base_url=f"{SERVER}/v1", api_key="none", max_retries=0, timeout=120)
MESSAGES: Any = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["c", "f"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
NOW: Any = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


class Place(BaseModel):
    country: Literal["France", "Spain"]
    million_people: int
    coastal: bool


CASES: dict[str, Callable[[], None]] = {}


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


def ask(**options: Any) -> Any:
    return client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0, **options)


@case
def models() -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


@case
def chat() -> None:
    answer = ask(max_completion_tokens=20)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@case
def chat_stream() -> None:
    whole = ask(max_tokens=20)
    text, usage, reasons = "", None, []
    for chunk in ask(max_tokens=20, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
        usage = chunk.usage or usage
    assert (text, reasons) == (whole.choices[0].message.content, [whole.choices[0].finish_reason])
    assert usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


@case
def chat_stream_helper() -> None:
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, temperature=0, max_tokens=20) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content == ask(max_tokens=20).choices[0].message.content


@case
def chat_choices_and_logprobs() -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, n=3, seed=7, max_tokens=5, logprobs=True, top_logprobs=2
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        assert choice.logprobs is not None
        entries = choice.logprobs.content or []
        assert all(len(entry.top_logprobs) == 2 for entry in entries)
        told = b"".join(bytes(entry.bytes or ()) for entry in entries).decode("utf-8", "replace")
        assert told == choice.message.content


@case
def completions() -> None:
    options: Any = {"model": MODEL, "prompt": "The sea is", "temperature": 0, "max_tokens": 8}
    whole = client.completions.create(**options, logprobs=1, echo=True)
    assert whole.choices[0].text.startswith("The sea is")
    streamed = "".join(chunk.choices[0].text for chunk in client.completions.create(**options, stream=True))
    assert "The sea is" + streamed == whole.choices[0].text


@case
def tools_auto() -> None:
    answer = ask(tools=[WEATHER, NOW], tool_choice="auto", max_tokens=40)
    message = answer.choices[0].message
    assert (message.content is not None) != bool(message.tool_calls)


def check_calls(calls: Any, *names: str) -> None:
    assert calls
    for call in calls:
        assert call.id
        assert call.function.name in names
        arguments = json.loads(call.function.arguments)
        assert set(arguments) == ({"city", "unit"} if call.function.name == "get_weather" else set())


@case
def tools_required() -> None:
    answer = ask(tools=[WEATHER, NOW], tool_choice="required", parallel_tool_calls=False, max_tokens=200)
    assert answer.choices[0].finish_reason == "tool_calls"
    check_calls(answer.choices[0].message.tool_calls, "get_weather", "now")


@case
def tools_named() -> None:
    answer = ask(tools=[WEATHER, NOW], tool_choice=NAMED, max_tokens=200)
    assert answer.choices[0].finish_reason == "tool_calls"
    check_calls(answer.choices[0].message.tool_calls, "get_weather")


@case
def tools_named_stream() -> None:
    options: Any = {"tools": [WEATHER, NOW], "tool_choice": NAMED, "max_tokens": 200}
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, temperature=0, **options) as stream:
        final = stream.get_final_completion().choices[0]
    whole = ask(**options).choices[0].message.tool_calls
    assert final.finish_reason == "tool_calls"
    check_calls(final.message.tool_calls, "get_weather")
    assert [call.function.arguments for call in final.message.tool_calls or ()] == [c.function.arguments for c in whole]


@case
def tools_required_stream() -> None:
    calls: dict[int, list[str]] = {}
    options: Any = {"tools": [WEATHER, NOW], "tool_choice": "required", "parallel_tool_calls": False}
    for chunk in ask(**options, max_tokens=200, stream=True):
        for delta in chunk.choices[0].delta.tool_calls or ():
            if delta.index not in calls:
                assert delta.id
                assert delta.function.name
                calls[delta.index] = [delta.function.name, ""]
            calls[delta.index][1] += delta.function.arguments or ""
    for _, arguments in calls.values():
        json.loads(arguments)
    assert list(calls) == [0]


@case
def tool_history() -> None:
    calls = ask(tools=[WEATHER], tool_choice=NAMED, max_tokens=200).choices[0].message
    result = {"role": "tool", "tool_call_id": calls.tool_calls[0].id, "content": "sunny, 20 degrees"}
    history: Any = [*MESSAGES, calls.model_dump(exclude_none=True), result]
    answer = client.chat.completions.create(model=MODEL, messages=history, tools=[WEATHER], max_tokens=10)
    assert answer.usage is not None


@case
def structured_output() -> None:
    schema = Place.model_json_schema() | {"additionalProperties": False}
    form: Any = {"type": "json_schema", "json_schema": {"name": "place", "strict": True, "schema": schema}}
    answer = ask(response_format=form, max_tokens=200)
    assert answer.choices[0].finish_reason == "stop"
    Place.model_validate_json(answer.choices[0].message.content)


@case
def structured_output_parse() -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=MESSAGES, temperature=0, response_format=Place, max_tokens=200
    )
    assert isinstance(answer.choices[0].message.parsed, Place)


@case
def structured_output_stream() -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=MESSAGES, temperature=0, response_format=Place, max_tokens=200
    ) as stream:
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Place)


@case
def json_object() -> None:
    answer = ask(response_format={"type": "json_object"}, max_tokens=60)
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content), dict)


@case
def tools_parse() -> None:
    class Weather(BaseModel):
        """The weather of a city."""

        unit: Literal["c", "f"]

    answer = client.chat.completions.parse(
        model=MODEL,
        messages=MESSAGES,
        temperature=0,
        tools=[openai.pydantic_function_tool(Weather)],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=200,
    )
    calls = answer.choices[0].message.tool_calls
    assert calls
    assert isinstance(calls[0].function.parsed_arguments, Weather)


@case
def errors() -> None:
    for expected, options in (
        (openai.BadRequestError, {"temperature": -1}),
        (openai.BadRequestError, {"messages": []}),
        (openai.NotFoundError, {"model": "nobody"}),
    ):
        try:
            client.chat.completions.create(**({"model": MODEL, "messages": MESSAGES} | options))
        except expected as error:
            refused = error.body
        else:
            raise AssertionError(f"{options} was taken")
        assert refused["message"], refused


@case
def asynchronous() -> None:
    async def run() -> None:
        async with AsyncOpenAI(base_url=f"{SERVER}/v1", api_key="none", max_retries=0) as many:
            options: Any = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 10}
            answers = await asyncio.gather(*(many.chat.completions.create(**options) for _ in range(4)))
            assert len({answer.choices[0].message.content for answer in answers}) == 1
            stream = await many.chat.completions.create(**options, stream=True)
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
            assert text == answers[0].choices[0].message.content

    asyncio.run(run())


@case
def leaving_a_stream() -> None:
    stream = ask(max_tokens=500, stream=True)
    next(iter(stream))
    stream.close()
    assert ask(max_tokens=1).choices


for name, function in CASES.items():
    problem = ""
    try:
        function()
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    print(json.dumps({"case": name, "passed": not problem, "note": problem}), flush=True)
