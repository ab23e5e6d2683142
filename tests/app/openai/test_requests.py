"""Request bodies, with no server: what is taken, what is refused, and what the refusal says."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from app.openai.chat_request import MAX_MESSAGES
from app.openai.errors import ApiError
from app.openai.requests import (
    MAX_PROMPTS,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    parse_chat,
    parse_completion,
)
from engine.errors import InvalidRequestError
from engine.structured.spec import StructuredOutputSpec

USER = {"role": "user", "content": "hi"}


def chat(**body: Any) -> ChatRequest:
    return parse_chat(json.dumps({"messages": [USER]} | body).encode())


def completion(**body: Any) -> CompletionRequest:
    return parse_completion(json.dumps({"prompt": "hi"} | body).encode())


def refusal(parse: Any, **body: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(**body)
    assert caught.value.status == 400
    assert set(caught.value.body()["error"]) == {"message", "type", "param", "code"}
    return caught.value


@pytest.mark.parametrize("value", [1.5, "5", True, [5], {}])
@pytest.mark.parametrize("name", ["max_tokens", "seed", "top_k", "min_tokens"])
def test_whole_numbers_are_not_converted(name: str, value: Any) -> None:
    assert refusal(chat, **{name: value}).param == name
    assert refusal(completion, **{name: value}).param == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", -1), ("temperature", -0.1), ("temperature", 1e9), ("top_p", 0), ("top_p", 1.01), ("min_p", 2),
        ("top_k", -2), ("seed", 2**63), ("stop", ""), ("stop", ["a", ""]), ("stop_token_ids", [-1]),
        ("min_tokens", 17), ("n", 0), ("n", 129), ("presence_penalty", 2.1), ("frequency_penalty", -2.1),
        ("repetition_penalty", 0), ("logit_bias", {"a": 1}), ("logit_bias", {"-1": 1}), ("logit_bias", [1]),
        ("logit_bias", {"5": "x"}), ("allowed_token_ids", []), ("allowed_token_ids", [-1]), ("bad_words", [""]),
        ("bad_words", [" "]), ("prompt_logprobs", -1), ("prompt_logprobs", 21), ("logprobs", 21), ("best_of", 0),
        ("priority", 2**31), ("cache_salt", ""),
    ],
)  # fmt: skip
def test_values_out_of_range_name_their_field(name: str, value: Any) -> None:
    with pytest.raises((ApiError, InvalidRequestError)) as refused:
        completion(**{name: value}).sampling_params()
    assert (refused.value.param or "").split("[")[0] == name


def test_min_tokens_without_any_token_to_make_are_refused() -> None:
    assert "max_tokens, which is 0" in refusal(completion, max_tokens=0, min_tokens=3).message


@pytest.mark.parametrize(("stop", "param"), [(5, "stop"), ([5], "stop[0]"), (["x"] * 129, "stop")])
def test_stop_takes_a_string_or_a_short_list_of_them(stop: Any, param: str) -> None:
    assert refusal(completion, stop=stop).param == param
    assert completion(stop="x").stop == ["x"]
    assert completion(stop=["x"] * 128).sampling_params().stop_strings == ("x",) * 128


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (CompletionRequest, {"prompt": "hi", "stop_token_ids": ["", ""]}),
        (CompletionRequest, {"prompt": "hi", "stop": [0, 0]}),
        (ChatRequest, {"messages": [0, 0]}),
    ],
)
def test_only_the_first_bad_item_of_a_list_is_reported(model: type[GenerationRequest], body: dict[str, Any]) -> None:
    # One error object for each would make gigabytes of the largest body that is taken.
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    assert caught.value.error_count() == 1


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_none_are_refused(number: str) -> None:
    body = json.dumps({"messages": [USER], "temperature": 7}).replace("7", number)
    with pytest.raises(ApiError) as caught:
        parse_chat(body.encode())
    assert caught.value.status == 400


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"text"', b"\xff{}", b"[" * 100_000])
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_chat(body)
    assert caught.value.status == 400


@pytest.mark.parametrize("escape", [r"\ud83d", r"\udc00", r"a\ud83dz"])
def test_half_a_surrogate_pair_is_refused(escape: str) -> None:
    for body in (f'{{"messages":[{{"role":"user","content":"{escape}"}}]}}', f'{{"prompt":"{escape}"}}'):
        with pytest.raises(ApiError, match="JSON") as caught:
            (parse_chat if "messages" in body else parse_completion)(body.encode())
        assert caught.value.status == 400


def test_chat_max_tokens_zero_is_refused() -> None:
    assert refusal(chat, max_tokens=0).param == "max_tokens"
    assert refusal(chat, max_completion_tokens=0).param == "max_completion_tokens"


def test_limits_by_default_and_by_name() -> None:
    assert chat().sampling_params().max_tokens is None
    assert completion().sampling_params().max_tokens == 16
    assert chat(max_tokens=5).sampling_params().max_tokens == 5
    assert chat(max_completion_tokens=6).sampling_params().max_tokens == 6
    assert chat(max_tokens=5, max_completion_tokens=6).sampling_params().max_tokens == 6
    assert completion(max_tokens=None).sampling_params().max_tokens == 16


def test_sampling_parameters_arrive_as_given() -> None:
    params = chat(
        temperature=0, top_p=0.5, top_k=7, min_p=0.1, seed=0, min_tokens=2, max_tokens=9, stop="END",
        stop_token_ids=[3], ignore_eos=True, include_stop_str_in_output=True, skip_special_tokens=False,
    ).sampling_params()  # fmt: skip
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.seed) == (0, 0.5, 7, 0.1, 0)
    assert (params.min_tokens, params.max_tokens, params.stop_strings, params.stop_token_ids) == (2, 9, ("END",), (3,))
    assert params.ignore_eos
    assert params.include_stop_str_in_output
    assert not params.skip_special_tokens


def test_null_is_as_good_as_absent() -> None:
    names = (
        "model", "stream", "stream_options", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "n",
        "tools", "logprobs", "response_format", "logit_bias", "presence_penalty", "frequency_penalty", "user",
    )  # fmt: skip
    assert chat(**dict.fromkeys(names)).sampling_params() == chat().sampling_params()


def test_unknown_fields_are_ignored_and_names_reach_the_template() -> None:
    request = chat(messages=[USER | {"name": "bob", "extra": 1}], user="me", metadata={"a": 1}, store=False, bogus=[1])
    assert [message.for_template() for message in request.messages] == [USER | {"name": "bob"}]


@pytest.mark.parametrize(
    ("name", "value", "neutral"),
    [
        ("length_penalty", 1.2, 1.0), ("truncate_prompt_tokens", 5, None),
        ("use_beam_search", True, False), ("logits_processors", ["x"], []), ("thinking_token_budget", 5, None),
        ("vllm_xargs", {"a": 1}, {}), ("return_prompt_text", True, False), ("repetition_detection", {}, None),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_unless_it_asks_for_nothing(name: str, value: Any, neutral: Any) -> None:
    for parse in (chat, completion):
        error = refusal(parse, **{name: value})
        assert (error.param, error.code) == (name, "unsupported_parameter")
        assert error.message.endswith(f"(got {json.dumps(value)}).")
        parse(**{name: neutral})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_logprobs", 3), ("tool_choice", "required"), ("tool_choice", "any"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}), ("modalities", ["audio"]),
        ("echo", True), ("n", True), ("n", 0), ("logprobs", 1),
        ("functions", [{"name": "f"}]), ("chat_template", "{{ 1 }}"), ("reasoning_effort", "much"),
        ("include_reasoning", False),
        ("tools", [{"type": "function"}]), ("tools", [{"type": "function", "function": {"name": "a b"}}]),
        ("tools", [{"type": "function", "function": {"name": "f"}}] * 2), ("messages", [USER] * (MAX_MESSAGES + 1)),
    ],
)  # fmt: skip
def test_refused_in_chats(name: str, value: Any) -> None:
    error = refusal(chat, **{name: value})
    assert (error.param or "").startswith(name)


@pytest.mark.parametrize(
    "body",
    [
        {"suffix": "x"}, {"logprobs": True}, {"best_of": 1, "n": 2}, {"best_of": 2, "stream": True},
        {"prompt_logprobs": 0, "stream": True}, {"prompt": ["a"] * 100, "n": 100}, {"echo": "yes"},
    ],
)  # fmt: skip
def test_refused_in_completions(body: dict[str, Any]) -> None:
    error = refusal(completion, **body)
    assert error.param in (None, *body)


def test_what_scores_the_prompt_may_make_no_token() -> None:
    assert completion(max_tokens=0, echo=True, logprobs=1).sampling_params().scores_only
    assert completion(max_tokens=0, prompt_logprobs=2).sampling_params().prompt_logprobs == 2
    assert completion(echo=True, logprobs=3, prompt_logprobs=1).sampling_params().prompt_logprobs == 3
    assert completion(echo=True).sampling_params().prompt_logprobs is None


def test_the_best_can_be_told_without_logprobs_being_shown() -> None:
    params = completion(n=2, best_of=5).sampling_params()
    assert (params.n, params.logprobs) == (5, 0)
    assert completion(n=2).sampling_params().logprobs is None


def test_tool_choices() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
    assert chat(tools=tools).forced_tools == []
    assert len(chat(tools=tools).offered_tools) == 2
    assert chat(tools=tools, tool_choice="none").offered_tools == []
    assert len(chat(tools=tools, tool_choice="required").forced_tools) == 2
    named = chat(tools=tools, tool_choice={"type": "function", "function": {"name": "g"}})
    assert [tool.function.name for tool in named.forced_tools] == ["g"]
    assert chat(tools=[], tool_choice="auto").offered_tools == []


def test_the_history_may_have_calls_and_results() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    turns = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]
    _, assistant, tool = (message.for_template() for message in chat(messages=turns).messages)
    assert assistant == {"role": "assistant", "content": "", "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    ]}  # fmt: skip
    assert tool == {"role": "tool", "content": "2", "tool_call_id": "c1"}
    for arguments in ("", "{}"):
        call["function"] = {"name": "f", "arguments": arguments}
        assert chat(messages=turns).messages[1].for_template()["tool_calls"][0]["function"]["arguments"] == {}
    for arguments in ('{"a": ', "[1]", '{"a": NaN}'):  # a call that was cut stays as it was
        call["function"] = {"name": "f", "arguments": arguments}
        assert chat(messages=turns).messages[1].for_template()["tool_calls"][0]["function"]["arguments"] == arguments


def test_text_parts_are_joined_by_a_newline() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "user", "content": parts}]).messages[0].content == "a\nb"


@pytest.mark.parametrize(
    "content",
    [
        None, 5, [], [5], ["text"], [{"type": "text"}], [{"type": "text", "text": None}],
        [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}],
        [{"type": "text", "text": "see"}, {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}],
    ],
)  # fmt: skip
def test_content_that_is_no_text_is_refused(content: Any) -> None:
    assert refusal(chat, messages=[USER, {"role": "user", "content": content}]).param == "messages[1].content"


def test_an_image_part_is_named_in_the_refusal() -> None:
    error = refusal(chat, messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])
    assert "image_url" in error.message


@pytest.mark.parametrize(
    "messages",
    [
        [], "hi", {}, None, [[]], [{}], [{"role": "user"}], [{"content": "hi"}], [{"role": "king", "content": "hi"}],
        [{"role": "tool", "content": "1"}], [{"role": "assistant", "content": None, "tool_calls": [{}]}],
    ],
)  # fmt: skip
def test_messages_that_are_none_are_refused(messages: Any) -> None:
    assert (refusal(chat, messages=messages).param or "").startswith("messages")


def test_messages_are_required() -> None:
    with pytest.raises(ApiError) as caught:
        parse_chat(b"{}")
    assert (caught.value.status, caught.value.param) == (400, "messages")


def test_developer_is_the_templates_system() -> None:
    request = chat(messages=[{"role": "developer", "content": "be brief"}, USER])
    assert request.messages[0].for_template()["role"] == "system"


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), ("", [""]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1, 2], [3]], [[1, 2], [3]])],
)
def test_the_four_shapes_of_a_prompt(prompt: Any, prompts: Any) -> None:
    assert completion(prompt=prompt).prompt == prompts


@pytest.mark.parametrize(
    "prompt",
    [None, [], {}, 5, [1.5], [True], ["a", 1], [[1], "a"], [[]], [[1], []], [["a"]], [None], ["a"] * (MAX_PROMPTS + 1)],
)
def test_other_shapes_of_a_prompt_are_refused(prompt: Any) -> None:
    assert refusal(completion, prompt=prompt).param == "prompt"


def test_stream_options_are_for_streams() -> None:
    assert chat(stream=True, stream_options={"include_usage": True}).include_usage
    assert not chat(stream=True, stream_options={}).include_usage
    assert "stream" in refusal(chat, stream_options={"include_usage": True}).message
    assert refusal(chat, stream=True, stream_options={"include_usage": "yes"}).param == "stream_options.include_usage"
    options = {"include_usage": True, "continuous_usage_stats": True}
    assert refusal(chat, stream=True, stream_options=options).param == "stream_options.continuous_usage_stats"


def test_thoughts_in_the_history_have_two_names() -> None:
    for name in ("reasoning", "reasoning_content"):
        request = chat(messages=[USER, {"role": "assistant", "content": "4", name: "2 and 2"}, USER])
        assert request.messages[1].for_template()["reasoning_content"] == "2 and 2"


@pytest.mark.parametrize(
    ("body", "options"),
    [
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, {"json_object": True}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}},
            {"json_schema": '{"type": "object"}'},
        ),
        ({"structured_outputs": {"json": {"type": "object"}}}, {"json_schema": '{"type": "object"}'}),
        ({"structured_outputs": {"json": '{"type": "object"}'}}, {"json_schema": '{"type": "object"}'}),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ("a", "b")}),
        ({"structured_outputs": {"grammar": "start: /a+/"}}, {"grammar": "start: /a+/"}),
        (
            {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
            {"json_object": True, "disable_any_whitespace": True},
        ),
        ({"guided_json": {"type": "object"}}, {"json_schema": '{"type": "object"}'}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a"]}, {"choice": ("a",)}),
        ({"guided_grammar": "start: /a+/"}, {"grammar": "start: /a+/"}),
    ],
)
def test_the_ways_to_ask_for_a_form(body: dict[str, Any], options: dict[str, Any]) -> None:
    for parse in (chat, completion):
        structure = parse(**body).structure()
        assert structure is not None
        assert structure.checked() == StructuredOutputSpec(**options)
        assert structure.param == next(iter(body))


def test_a_text_is_no_form() -> None:
    assert chat(response_format={"type": "text"}).structure() is None
    assert chat().structure() is None


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": "json"}, {"response_format": {"type": "xml"}}, {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}},
        {"structured_outputs": {}}, {"structured_outputs": {"regex": "("}}, {"structured_outputs": {"choice": []}},
        {"structured_outputs": {"regex": "a", "choice": ["a"]}}, {"structured_outputs": {"json": 5}},
        {"structured_outputs": {"json": "{"}}, {"guided_json": True}, {"guided_regex": "(?=a)"},
        {"guided_choice": [1]}, {"guided_grammar": "no rules"}, {"structured_outputs": {"structural_tag": "{}"}},
        {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
    ],
)  # fmt: skip
def test_forms_that_are_none_are_refused_by_their_own_names(body: dict[str, Any]) -> None:
    for parse in (chat, completion):
        with pytest.raises((ApiError, InvalidRequestError)) as caught:
            parse(**body).structure().checked()
        assert (caught.value.param or "").startswith(next(iter(body)))


@pytest.mark.parametrize(
    ("given", "instead"),
    [
        ({"json_schema": {"type": "object"}}, ", not json_schema (did you mean json?)"),
        ({"choise": ["a"]}, ", not choise (did you mean choice?)"),
        ({"guided_regex": "a"}, ", not guided_regex (did you mean regex?)"),
        ({"json_object": False, "xml": "a"}, ", not xml"),
        ({"json": {}, "regex": "a"}, ", not json and regex"),
        ({"disable_any_whitespace": True}, ""),
    ],
)
def test_of_structured_outputs_the_fields_of_http_are_named_and_the_one_that_was_meant(
    given: dict[str, Any], instead: str
) -> None:
    error = refusal(chat, structured_outputs=given)
    assert error.param == "structured_outputs"
    told = "structured_outputs: takes exactly one of json, json_object, regex, choice and grammar"
    assert error.message.startswith(f"{told}{instead} (got ")


def test_only_one_form_can_be_asked_for() -> None:
    with pytest.raises(InvalidRequestError, match="one of them"):
        chat(guided_regex="a", response_format={"type": "json_object"}).structure()
    tools = [{"type": "function", "function": {"name": "f"}}]
    with pytest.raises(InvalidRequestError, match="tool_choice"):
        chat(tools=tools, tool_choice="required", guided_regex="a").structure()


def test_a_demanded_call_is_a_form() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
    required = chat(tools=tools, tool_choice="required").structure()
    assert required is not None
    schema = json.loads(required.checked().json_schema or "")
    assert (schema["type"], "maxItems" in schema) == ("array", False)
    single = chat(tools=tools, tool_choice="required", parallel_tool_calls=False).structure()
    assert single is not None
    assert json.loads(single.checked().json_schema or "")["maxItems"] == 1
    named = chat(tools=tools, tool_choice={"type": "function", "function": {"name": "g"}}).structure()
    assert named is not None
    assert json.loads(named.checked().json_schema or "")["type"] == "object"
    assert chat(tools=tools).structure() is None


def test_the_model_s_defaults_stand_where_a_request_says_nothing() -> None:
    defaults = {"temperature": 0.6, "top_k": 20}
    for make in (chat, completion):
        params = make(temperature=0.0).sampling_params(defaults=defaults)
        assert (params.temperature, params.top_k, params.top_p) == (0.0, 20, 1.0)
        assert make().sampling_params(defaults=defaults).temperature == 0.6
