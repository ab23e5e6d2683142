"""Chat templates: what they are given, that they end, and what they may not do."""

from pathlib import Path
from typing import Any

import pytest

from app.openai.messages import Message
from app.prompts.chat_template import Chat, ChatTemplate, load_template
from engine.errors import ConfigError, InvalidRequestError
from engine.text.tokenizer import Tokenizer
from tests.tiny_models import CHAT_TEMPLATE

USER = {"role": "user", "content": "hi"}
ADD = {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}


def render(source: str, messages: list[dict[str, Any]] | None = None, **options: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(Chat(messages or [USER], **options))


def test_the_prompt_is_transformers_own(tokenizer: Tokenizer) -> None:
    messages = [{"role": "system", "content": "be brief"}, USER, {"role": "assistant", "content": " é "}, USER]
    for prompt in (True, False):
        expected = tokenizer.hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        assert render(CHAT_TEMPLATE, messages, add_generation_prompt=prompt) == expected
    expected = tokenizer.hf.apply_chat_template(messages[:3], tokenize=False, continue_final_message=True)
    continued = render(CHAT_TEMPLATE, messages[:3], add_generation_prompt=False, continue_final_message=True)
    assert continued == expected
    assert continued.endswith("é ")


def test_special_tokens_and_variables_are_there() -> None:
    source = "{{ bos_token }}{% if enable_thinking is defined and not enable_thinking %}<no>{% endif %}"
    assert render(source, variables={"enable_thinking": False, "no_such": 1}) == "<s><no>"
    assert "enable_thinking" in ChatTemplate(source, {}).variables


def test_a_template_cannot_be_given_other_messages() -> None:
    with pytest.raises(InvalidRequestError, match="cannot set messages") as caught:
        render("x", variables={"messages": []})
    assert caught.value.param == "chat_template_kwargs"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 'a' * 10**9 }}",
        "{{ messages * 10**9 }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ messages[0].content * 10**9 }}",
        "{{ 10 ** (10 ** 9) }}",
    ],
)
def test_a_template_that_would_not_end_is_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.prompts.chat_template.MAX_RENDER_S", 0.05)
    with pytest.raises(InvalidRequestError) as caught:
        render(source)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}", "{{ cycler.__init__.__globals__ }}", "{{ messages.append(1) }}",
        "{{ messages.append.__self__.x }}", "{{ raise_exception('no') }}", "{{ messages[0]['nothing'].more }}",
    ],
)  # fmt: skip
def test_what_a_template_may_not_do_is_a_refusal(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="chat template refused"):
        render(source)


def test_loops_keep_their_variables() -> None:
    source = (
        "{% for m in messages if m.role == 'user' %}{{ loop.index }}/{{ loop.length }}{{ ',' if not loop.last }}"
        "{% endfor %}{% for k, v in messages[0].items() %}{{ k }}{% endfor %}"
        "{% for x in nothing %}{% else %}!{% endfor %}"
    )
    assert render(source, [USER, {"role": "system", "content": ""}, USER]) == "1/2,2/2rolecontent!"


def test_tools_reach_a_template_that_knows_them() -> None:
    source = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}{{ messages | length }}"
    assert render(source, tools=[ADD]) == "add1"
    assert render(source) == "1"


def test_a_template_that_knows_no_tools_is_told_in_the_system_message() -> None:
    prompt = render(CHAT_TEMPLATE, [{"role": "system", "content": "be brief"}, USER], tools=[ADD])
    assert prompt.count("<|im_start|>system") == 1
    assert "be brief" in prompt
    assert '"name": "add"' in prompt
    assert "<tool_call>" in prompt
    assert '"name": "add"' in render(CHAT_TEMPLATE, tools=[ADD])


def test_calls_and_results_in_the_history_become_text_where_the_template_knows_none() -> None:
    call = {"id": "1", "function": {"name": "add", "arguments": '{"a": 1}'}}
    turns = [
        Message(role="user", content="hi"),
        Message.model_validate({"role": "assistant", "content": None, "tool_calls": [call, call]}),
        Message(role="tool", tool_call_id="1", content="2"),
        Message(role="tool", tool_call_id="1", content="3"),
        Message(role="user", content="so?"),
    ]
    prompt = render(CHAT_TEMPLATE, [turn.for_template() for turn in turns])
    assert prompt.count('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>') == 2
    assert "<|im_start|>user\n<tool_response>\n2\n</tool_response>\n<tool_response>\n3\n</tool_response>" in prompt
    assert "None" not in prompt


def test_a_text_that_is_no_template_is_a_bad_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no Jinja"):
        ChatTemplate("{% for %}", {})
    with pytest.raises(ConfigError, match="cannot be read"):
        load_template(str(tmp_path / "none.jinja"))
    file = tmp_path / "t.jinja"
    file.write_text("{{ 1 }}")
    assert load_template(str(file)) == load_template("{{ 1 }}") == "{{ 1 }}"
