"""Request bodies, with no server: what is taken, what is refused, and what the refusal says."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

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
        ("min_tokens", 17),
    ],
)  # fmt: skip
def test_values_out_of_range_name_their_field(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        completion(**{name: value}).sampling_params()
    assert caught.value.param == name


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
    with pytest.raises(InvalidRequestError, match="max_tokens"):
        chat(max_tokens=0).sampling_params()
    with pytest.raises(InvalidRequestError, match="max_tokens"):
        chat(max_completion_tokens=0).sampling_params()


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


def test_unknown_fields_and_message_names_are_ignored() -> None:
    request = chat(messages=[USER | {"name": "bob", "extra": 1}], user="me", metadata={"a": 1}, store=False, bogus=[1])
    assert [message.for_template() for message in request.messages] == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("name", "value", "neutral"),
    [
        ("n", 2, 1), ("presence_penalty", 0.5, 0), ("frequency_penalty", -1, 0.0), ("logit_bias", {"5": 1}, {}),
        ("response_format", {"type": "json_object"}, {"type": "text"}), ("repetition_penalty", 1.2, 1.0),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_unless_it_asks_for_nothing(name: str, value: Any, neutral: Any) -> None:
    for parse in (chat, completion):
        error = refusal(parse, **{name: value})
        assert (error.param, error.code) == (name, "unsupported_parameter")
        parse(**{name: neutral})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logprobs", True), ("top_logprobs", 3), ("tools", [{"type": "function"}]), ("tool_choice", "required"),
        ("modalities", ["audio"]), ("reasoning_effort", "high"), ("echo", True), ("n", True), ("n", 0),
    ],
)  # fmt: skip
def test_unsupported_in_chats(name: str, value: Any) -> None:
    assert refusal(chat, **{name: value}).param == name


@pytest.mark.parametrize(("name", "value"), [("logprobs", 0), ("logprobs", 2), ("best_of", 2), ("suffix", "x")])
def test_unsupported_in_completions(name: str, value: Any) -> None:
    assert refusal(completion, **{name: value}).param == name


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
