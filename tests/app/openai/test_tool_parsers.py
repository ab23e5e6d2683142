"""Tool calls and thoughts in model output: whole or in pieces, well written or not."""

import json
import random
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.openai.output import OutputReader
from app.openai.parsing import CallArguments, CallEnd, CallStart, Content, Event, Reasoning, StreamParser
from app.openai.reasoning import MISTRAL_THINK, THINK, ThinkParser, thought_marks
from app.openai.tool_parsers import PARSERS, ArgumentsParser, ArrayParser, detect_tool_parser

TOOLS = ("get_weather", "add", "now")
PARIS = {"city": "Paris", "days": [1, 2.5, -3e2], "deep": {"a": None, "b": True, "c": "{}[]()\"'\\ </tool_call> é 🌶"}}


@dataclass
class Output:
    content: str = ""
    reasoning: str = ""
    calls: list[list[Any]] = field(default_factory=list)  # name, arguments, whole or not


def folded(events: list[Event]) -> Output:
    output = Output()
    for event in events:
        match event:
            case Content(text):
                output.content += text
            case Reasoning(text):
                output.reasoning += text
            case CallStart(name):
                output.calls.append([name, "", False])
            case CallArguments(text):
                output.calls[-1][1] += text
            case CallEnd():
                output.calls[-1][2] = True
    return output


def read(parser: StreamParser, text: str, cuts: list[int] | None = None) -> Output:
    at = sorted({0, len(text), *(cuts or ())})
    events = [event for start, end in pairwise(at) for event in parser.feed(text[start:end])]
    return folded([*events, *parser.finish()])


def parse(name: str, text: str) -> Output:
    """Whole, character by character and in a few random cuts: all the same."""
    whole = read(PARSERS[name](TOOLS), text)
    generator = random.Random(text)
    for cuts in (list(range(len(text))), *(generator.sample(range(len(text) + 1), min(3, len(text))) for _ in "abc")):
        assert read(PARSERS[name](TOOLS), text, cuts) == whole
    return whole


def form(name: str, *calls: tuple[str, Any]) -> str:
    """`calls` as a model of that kind writes them."""
    key = "parameters" if name == "llama3_json" else "arguments"
    objects = [json.dumps({"name": tool, key: arguments}, ensure_ascii=False) for tool, arguments in calls]
    match name:
        case "hermes":
            return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in objects)
        case "llama3_json":
            return "; ".join(objects)
        case "mistral":
            return f"[TOOL_CALLS] [{', '.join(objects)}]"
    written = (f"{tool}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})" for tool, arguments in calls)
    return f"[{', '.join(written)}]"


@pytest.mark.parametrize("name", PARSERS)
def test_calls_are_found_and_the_text_around_them_kept(name: str) -> None:
    calls = (("get_weather", PARIS), ("now", {}))
    output = parse(name, "Let me see.\n" + form(name, *calls) + "\nThat is all.")
    assert [(tool, json.loads(arguments), done) for tool, arguments, done in output.calls] == [
        ("get_weather", PARIS, True), ("now", {}, True)
    ]  # fmt: skip
    assert output.content == "Let me see.That is all."


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"arguments": {"city": "Paris"}, "name": "get_weather"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>'),
        ("hermes", '<tool_call>{"id": 1, "name": "get_weather", "parameters": {"city": "Paris"}, "x": []}</tool_call>'),
        ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}'),
        ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}\n</tool_call>'),
        ("llama3_json", '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}'),
        ("llama3_json", '{"type": "function", "name": "get_weather", "parameters": {"city": "Paris"}}'),
        ("mistral", '[TOOL_CALLS]get_weather{"city": "Paris"}'),
        ("mistral", '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}'),
        ("mistral", '[TOOL_CALLS]get_weather[CALL_ID]abc123def[ARGS]{"city": "Paris"}'),
        ("mistral", '[TOOL_CALLS]{"name": "get_weather", "arguments": {"city": "Paris"}}'),
        ("pythonic", "[get_weather(city='Paris')]"),
        ("pythonic", '[ get_weather( city = "Paris" ) ]'),
        ("pythonic", '<|python_start|>[get_weather(city="Paris")]<|python_end|>'),
    ],
)
def test_the_ways_to_write_one_call(name: str, text: str) -> None:
    output = parse(name, text)
    ((tool, arguments, done),) = output.calls
    assert (tool, json.loads(arguments), done) == ("get_weather", {"city": "Paris"}, True)
    assert output.content == ""


def test_several_named_mistral_calls() -> None:
    output = parse("mistral", '[TOOL_CALLS]add{"a": 1}[TOOL_CALLS]now{}')
    assert output.calls == [["add", '{"a": 1}', True], ["now", "{}", True]]


def test_a_call_without_arguments_has_none() -> None:
    for text in ('{"name": "now"}', '{"name": "now", "arguments": null}'):
        assert parse("hermes", f"<tool_call>{text}</tool_call>").calls == [["now", "{}", True]]


def test_line_breaks_in_strings_are_escaped() -> None:
    output = parse("hermes", '<tool_call>{"name": "add", "arguments": {"code": "a\n\tb"}}</tool_call>')
    assert json.loads(output.calls[0][1]) == {"code": "a\n\tb"}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "<tool_call>get_weather(Paris)</tool_call> and on"),
        ("hermes", "<tool_call></tool_call>"),
        ("hermes", "<tool_call>{'name': 'now'}</tool_call>"),
        ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "\\ud83d", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "now", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "now", "arguments": "\\ud83d"}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {"a": 01}, "name": "now"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "now'),
        ("hermes", "a < b <tool_cal"),
        ("llama3_json", 'The set {1, 2} and {"name": "Bob", "age": 5}, {"name": "Bob", "parameters": {}} {'),
        ("llama3_json", "{{{{"),
        ("pythonic", "[1, 2] and [rm(a=1)] and [get_weather('Paris')] [now(**x)] [add(a=f(1))] [add(a=1e999)] [add(a="),
        ("pythonic", '[add(a="\\ud83d")] [add(a=1'),
        ("pythonic", "[[[[get_weather"),
        ("pythonic", "[add(a=" + "[" * 500 + "]" * 500 + ")]"),
    ],
)  # fmt: skip
def test_what_is_no_call_is_content_and_nothing_of_it_is_lost(name: str, text: str) -> None:
    assert parse(name, text) == Output(content=text)


@pytest.mark.parametrize(
    ("name", "text", "content"),
    [
        ("llama3_json", "<|python_tag|>print(1)", "print(1)"),
        ("mistral", "[TOOL_CALLS] nothing", " nothing"),
        ("mistral", "Let me see.[TOOL_CALLS]", "Let me see."),
        ("mistral", "[TOOL_CALLS][]", "[]"),
        ("mistral", "[TOOL_CALLS]now[CALL_ID]abc[ARGS]", "nowabc"),
    ],
)
def test_special_tokens_of_what_is_no_call_are_no_content(name: str, text: str, content: str) -> None:
    assert parse(name, text) == Output(content=content)


@pytest.mark.parametrize("name", PARSERS)
def test_text_without_calls_is_as_it_was(name: str) -> None:
    text = "\n Hello,  world \n\n - a\n"
    assert parse(name, text) == Output(content=text)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1, "b": oops}}</tool_call> sorry'),
        ("llama3_json", '{"name": "add", "parameters": {"a": 1, "b": oops}}'),
        ("mistral", '[TOOL_CALLS]add{"a": 1, "b": oops}'),
    ],
)
def test_a_call_that_goes_wrong_in_its_arguments_stays_open(name: str, text: str) -> None:
    output = parse(name, text)
    assert [(tool, done) for tool, _, done in output.calls] == [("add", False)]
    assert output.calls[0][1].rstrip() == '{"a": 1, "b":'
    assert output.content == text[text.index("oops") :]


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral"])
def test_a_call_that_is_cut_is_never_whole(name: str) -> None:
    text = form(name, ("add", {"a": "x", "b": [1, {"c": "\u00e9"}]}))
    for end in range(len(text)):
        output = parse(name, text[:end])
        arguments = "".join(arguments for _, arguments, _ in output.calls)
        assert all(not done or json.loads(arguments) for _, _, done in output.calls)
        assert arguments in text[:end]
        if not output.calls:
            assert output.content == text[:end].replace("[TOOL_CALLS]", "")


def test_arguments_come_as_they_are_written() -> None:
    parser = PARSERS["hermes"](TOOLS)
    text = form("hermes", ("add", {"a": "some words", "b": 12}))
    seen = [parser.feed(character) for character in text]
    deltas = [event.text for events in seen for event in events if isinstance(event, CallArguments)]
    assert len(deltas) > 10
    assert json.loads("".join(deltas)) == {"a": "some words", "b": 12}


def test_hundreds_of_brackets_are_content_soon() -> None:
    deep = '<tool_call>{"name": "add", "arguments": ' + '{"a":' * 5000
    output = read(PARSERS["hermes"](TOOLS), deep)
    assert [done for _, _, done in output.calls] == [False]
    assert output.content


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
_CALLS = st.lists(
    st.tuples(
        st.sampled_from(TOOLS), st.dictionaries(st.from_regex(r"x[a-z_]{0,5}", fullmatch=True), _JSON, max_size=3)
    ),
    min_size=1,
    max_size=3,
)


@pytest.mark.parametrize("name", PARSERS)
@given(calls=_CALLS, seed=st.integers(0, 2**32))
def test_any_calls_come_back_however_they_are_cut(name: str, calls: list[tuple[str, Any]], seed: int) -> None:
    text = form(name, *calls)
    generator = random.Random(seed)
    output = read(PARSERS[name](TOOLS), text, [generator.randrange(len(text)) for _ in range(8)])
    assert [(tool, json.loads(arguments)) for tool, arguments, _ in output.calls] == calls
    assert all(done for _, _, done in output.calls)
    assert output.content == ""


_PIECES = st.sampled_from(
    ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "{", "}", "[", "]", "(", ")", '"', ",", ":", ";",
     '"name"', '"now"', '"arguments"', '"parameters"', "now", "add", "=", "1", "null", "\\", "\\u00e9", " ", "\n",
     "[ARGS]", '{"name":"now","arguments":{', '{"name": "add", "parameters": {"a": 1}}', "<think>", "</think>",
     "é🌶", "'"]
)  # fmt: skip


@pytest.mark.parametrize("name", [*PARSERS, "array", "arguments", "think", "thought"])
@given(pieces=st.lists(_PIECES, max_size=25), seed=st.integers(0, 2**32))
def test_any_text_gives_the_same_however_it_is_cut(name: str, pieces: list[str], seed: int) -> None:
    def make() -> StreamParser:
        match name:
            case "array":
                return ArrayParser(TOOLS)
            case "arguments":
                return ArgumentsParser(("now",))
            case "think" | "thought":
                return ThinkParser(opened=name == "thought")
        return PARSERS[name](TOOLS)

    text = "".join(pieces)
    generator = random.Random(seed)
    whole = read(make(), text)
    assert read(make(), text, [generator.randrange(len(text) + 1) for _ in range(5)]) == whole
    assert read(make(), text, list(range(len(text)))) == whole


def test_constrained_output_is_read_as_calls() -> None:
    text = '[{"name": "add", "parameters": {"a": 1}}, {"name": "now", "parameters": {}}]'
    assert read(ArrayParser(TOOLS), text).calls == [["add", '{"a": 1}', True], ["now", "{}", True]]
    assert read(ArgumentsParser(("add",)), '{"a": 1}').calls == [["add", '{"a": 1}', True]]
    assert read(ArgumentsParser(("add",)), '{"a": ').calls == [["add", '{"a": ', False]]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ('in the format {"name": function name, "parameters": dictionary of argument name and value}', "llama3_json"),
        ("{{ '[TOOL_CALLS] [' }}", "mistral"),
        ("put it in the format of [func_name1(params_name1=params_value1)]", "pythonic"),
        ("{{ messages }}", "hermes"),
        (None, "hermes"),
    ],
)  # fmt: skip
def test_the_form_is_known_from_the_template(template: str | None, name: str) -> None:
    assert detect_tool_parser(template) == name


@pytest.mark.parametrize(
    ("opened", "text", "reasoning", "content"),
    [
        (False, "<think>\nHm, 1 < 2.\n</think>\n\nYes.\n", "Hm, 1 < 2.", "Yes.\n"),
        (True, "Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
        (True, "<think>Hm.</think>Yes.", "Hm.", "Yes."),
        (False, "  Yes, <think>not</think>", "", "  Yes, <think>not</think>"),
        (False, "<think>cut </thi", "cut </thi", ""),
        (False, "<thi", "", "<thi"),
        (False, "<think></think>Yes.", "", "Yes."),
        (True, "", "", ""),
        (False, "\n", "", "\n"),
    ],
)
def test_thoughts_are_apart_from_the_answer(opened: bool, text: str, reasoning: str, content: str) -> None:
    for cuts in ([], list(range(len(text)))):
        assert read(ThinkParser(opened), text, cuts) == Output(content=content, reasoning=reasoning)


def test_a_template_says_whether_and_how_its_model_thinks() -> None:
    assert thought_marks("{% if '</think>' in content %}") is THINK
    assert thought_marks("{{ '[THINK]' }}{{ '[/THINK]' }}") is MISTRAL_THINK
    assert thought_marks("{{ messages }}") is None
    assert THINK.begun_by("<|im_start|>assistant\n<think>\n")
    assert not THINK.begun_by("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert THINK.left_open_in("a <think> b")
    assert not THINK.left_open_in("<think> b </think> c")


def test_a_call_in_a_thought_is_none() -> None:
    text = "[THINK]Say [TOOL_CALLS]now{}?[/THINK]Yes. [TOOL_CALLS]now[ARGS]{}"
    for cuts in ([], list(range(len(text)))):
        reader = OutputReader(ThinkParser(False, MISTRAL_THINK), PARSERS["mistral"](TOOLS))
        assert reader.needs_special_tokens
        assert read(reader, text, cuts) == Output("Yes.", "Say [TOOL_CALLS]now{}?", [["now", "{}", True]])


@pytest.mark.parametrize("parser", [ArrayParser(("add", "now")), ArgumentsParser(("add",))])
def test_of_a_demanded_call_nothing_is_content(parser: StreamParser) -> None:
    text = '[{"name": "add", "parameters": {"a": 1}}, {"name": "no' if isinstance(parser, ArrayParser) else '{"a": 1'
    output = read(parser, text, list(range(len(text))))
    assert output.content == ""
    assert [name for name, *_ in output.calls] == ["add"]
