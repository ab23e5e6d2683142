"""Chat templates: sandboxed programs that make a prompt of messages, and that end."""

import logging
import re
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, TemplateError, meta, nodes
from jinja2.exceptions import SecurityError

from app.openai.tool_prompt import with_tools, without_tool_turns
from engine.errors import ConfigError, InvalidRequestError
from engine.text.tokenizer import Tokenizer

logger = logging.getLogger("ray.serve")

MAX_RENDER_S = 2.0
"""Processor time that a template may take; thousands of messages take a tenth of it."""

_MAX_REPEATED = 1_000_000
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})

_deadline: ContextVar[float] = ContextVar("deadline")


@dataclass(frozen=True, slots=True)
class Chat:
    """What a template is given. variables: further ones, of the request (`enable_thinking`)."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)


class ChatTemplate:
    """A template and what can be told of it without running it.

    source: Jinja text. special_tokens: variables like `bos_token`. Raises `ConfigError` if the text is no template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        # Here, since it takes a second, which importing the application need not.
        from transformers.utils.chat_template_utils import _compile_jinja_template

        self.source = source
        self._special_tokens = dict(special_tokens)
        try:
            # transformers' own environment: what is a template there, with the same filters, is one here.
            environment: Environment = _compile_jinja_template("").environment
            _bound(environment)  # before anything is parsed: products of constants are made then
            tree = environment.parse(source)
            self.variables = frozenset(meta.find_undeclared_variables(tree))
            _limit(tree, environment)
            self._template = environment.from_string(tree)
        except (TemplateError, RecursionError) as error:
            raise ConfigError(f"the chat template is no Jinja template: {error}") from error

    @property
    def knows_tools(self) -> bool:
        return "tools" in self.variables

    @property
    def developer_role(self) -> str:
        """What the template calls the role that OpenAI calls `developer` now."""
        return "developer" if re.search(r"""["']developer["']""", self.source) else "system"

    def render(self, chat: Chat) -> str:
        """The prompt. Raises `InvalidRequestError` with the template's own words, or if it does not end in time."""
        if taken := sorted(_RESERVED & chat.variables.keys()):
            raise InvalidRequestError(
                f"chat_template_kwargs cannot set {', '.join(taken)}, which the request's own fields do.",
                "chat_template_kwargs",
            )
        messages = chat.messages
        if not self.knows_tools:
            messages = without_tool_turns(with_tools(messages, chat.tools) if chat.tools else messages)
        mark = ""
        if chat.continue_final_message:
            mark = f"<continue {secrets.token_hex(8)}>"
            messages = [*messages[:-1], messages[-1] | {"content": messages[-1]["content"] + mark}]
        variables = self._special_tokens | {
            **chat.variables,
            "messages": messages,
            "tools": chat.tools or None,
            "documents": None,
            "add_generation_prompt": chat.add_generation_prompt,
        }
        text = self._run(variables)
        return _up_to(mark, text) if mark else text

    def _run(self, variables: dict[str, Any]) -> str:
        token = _deadline.set(time.thread_time() + MAX_RENDER_S)
        try:
            return self._template.render(variables)
        except _TooSlowError:
            raise InvalidRequestError(
                f"The chat template did not end within {MAX_RENDER_S:g} s: send fewer or shorter messages.", "messages"
            ) from None
        except Exception as error:  # a template is a program of its own: it raises what it likes
            told = str(error)[:500]
            raise InvalidRequestError(f"The chat template refused the messages: {told}", "messages") from error
        finally:
            _deadline.reset(token)


def load_template(setting: str) -> str:
    """A chat template from a setting: its text, or the path of a file that has it. Raises `ConfigError`."""
    if "{" in setting:  # no path has one, and every template has
        return setting
    try:
        return Path(setting).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"chat_template: {setting} cannot be read ({type(error).__name__})") from error


@dataclass(frozen=True, slots=True)
class ChatTemplates:
    """A model's templates: some have one of their own for chats with tools."""

    default: ChatTemplate
    tool_use: ChatTemplate | None = None

    def pick(self, with_tools: bool) -> ChatTemplate:
        return self.tool_use if with_tools and self.tool_use is not None else self.default


def chat_templates(tokenizer: Tokenizer, setting: str | None = None) -> ChatTemplates | None:
    """Those of a setting (see `load_template`) or else of the model; None if it has none that can be used.

    Raises `ConfigError` for a setting that is wrong.
    """
    tokens = {name: str(token) for name, token in tokenizer.hf.special_tokens_map.items()}
    if setting is not None:
        return ChatTemplates(ChatTemplate(load_template(setting), tokens))
    own = tokenizer.hf.chat_template
    sources = own if isinstance(own, dict) else {"default": own}
    try:
        made = {name: ChatTemplate(source, tokens) for name, source in sources.items() if source}
    except ConfigError as error:
        logger.warning("the model takes no chats: %s", error)
        return None
    default = made.get("default")
    return None if default is None else ChatTemplates(default, made.get("tool_use"))


class _TooSlowError(Exception):
    """The template has used up its time."""


def _tick() -> str:
    if time.thread_time() > _deadline.get():
        raise _TooSlowError
    return ""


def _bounded(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _tick()
        yield item


def _limit(tree: nodes.Template, environment: Environment) -> None:
    """Have the program look at the clock at each turn of a loop and each call of a macro.

    The sandbox bounds `range`, but not loops within loops.
    """
    for loop in tree.find_all(nodes.For):
        loop.iter = _call("__bounded", loop.iter)
    for macro in tree.find_all(nodes.Macro):
        macro.body.insert(0, nodes.Output([_call("__tick")]))
    tree.set_environment(environment)


def _call(name: str, *arguments: Any) -> nodes.Call:
    return nodes.Call(nodes.Name(name, "load"), list(arguments), [], None, None)


def _bound(environment: Any) -> None:
    """Give a sandboxed environment the functions of `_limit`, and products that stay small. Does it once."""
    if "__tick" in environment.globals:
        return
    environment.globals.update(__bounded=_bounded, __tick=_tick)
    environment.intercepted_binops = frozenset({"*", "**"})
    plain = environment.call_binop

    def call_binop(context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and isinstance(right, int) and abs(right) > 64:
            raise SecurityError("the exponent is too large")
        for text, count in ((left, right), (right, left)):
            if hasattr(text, "__len__") and isinstance(count, int) and len(text) * count > _MAX_REPEATED:
                raise SecurityError("the repeated text is too long")
        return plain(context, operator, left, right)

    environment.call_binop = call_binop


def _up_to(mark: str, text: str) -> str:
    """`text` before `mark`, which stands where the last message ends; templates that trim it leave a part."""
    at = text.rfind(mark)
    if at < 0:
        raise InvalidRequestError(
            "continue_final_message: the chat template changes or leaves out the end of the last message.",
            "continue_final_message",
        )
    return text[:at]
