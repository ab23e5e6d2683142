"""The chat side of a model: what of a request its template is given, and how its output is to be read."""

import secrets
import string
from collections.abc import Callable
from typing import Any, Literal

from app.openai.chat_request import ChatRequest
from app.openai.errors import ApiError
from app.openai.messages import Message
from app.openai.output import OutputReader
from app.openai.reasoning import ThinkParser, thought_marks
from app.openai.tokenization import TokenizeRequest
from app.openai.tool_parser import ToolParser
from app.openai.tool_parsers import PARSERS, ArgumentsParser, ArrayParser, detect_tool_parser
from app.openai.tools import NamedChoice
from app.prompts.chat_template import Chat, ChatTemplate, ChatTemplates
from engine.errors import InvalidRequestError

ToolParserSetting = Literal["auto", "hermes", "llama3_json", "mistral", "pythonic", "none"]
ReasoningSetting = Literal["auto", "none"]

_LETTERS = string.ascii_letters + string.digits


class ChatSide:
    """tool_parser, reasoning_parser: settings; `auto` goes by the chat template."""

    def __init__(
        self,
        templates: ChatTemplates | None,
        tool_parser: ToolParserSetting = "auto",
        reasoning_parser: ReasoningSetting = "auto",
    ) -> None:
        self._templates = templates
        self._tool_parser = tool_parser
        self._reasons = reasoning_parser == "auto"

    def template(self, with_tools: bool) -> ChatTemplate:
        """Raises `InvalidRequestError` if the model has none."""
        if self._templates is None:
            raise InvalidRequestError(
                "This model has no chat template, so it takes no messages: send a prompt instead.", "messages"
            )
        return self._templates.pick(with_tools)

    def chat(self, request: ChatRequest | TokenizeRequest, template: ChatTemplate) -> Chat:
        """Raises `ApiError` for what the template has no use for."""
        continued = bool(request.continue_final_message)
        tools = request.offered_tools if isinstance(request, ChatRequest) else request.tools or []
        return Chat(
            [message.for_template(template.developer_role) for message in request.messages or ()],
            [tool.for_template() for tool in tools],
            add_generation_prompt=not continued and request.add_generation_prompt is not False,
            continue_final_message=continued,
            variables=_variables(request, template),
        )

    def parser(self, request: ChatRequest, template: ChatTemplate) -> Callable[[], ToolParser] | None:
        """Makes a parser of the calls that may be in an output; None if there can be none."""
        if not request.offered_tools:
            return None
        names = tuple(tool.function.name for tool in request.offered_tools)
        if isinstance(request.tool_choice, NamedChoice):
            name = request.tool_choice.function.name
            return lambda: ArgumentsParser((name,))
        if request.tool_choice == "required":
            return lambda: ArrayParser(names)
        if self._tool_parser == "none":
            return None
        kind: str = self._tool_parser
        if kind == "auto":
            kind = detect_tool_parser(template.source) if template.knows_tools else "hermes"
        return lambda: PARSERS[kind](names)

    def reader(
        self, request: ChatRequest, template: ChatTemplate, prompt: str, constrained: bool
    ) -> Callable[[], OutputReader] | None:
        """Makes a reader for each output; None if its text is to be taken as it is.

        constrained: whether a grammar holds from the first token on, which leaves no place for a thought.
        """
        parser = self.parser(request, template)
        marks = thought_marks(template.source) if self._reasons and not constrained else None
        if marks is None:
            return None if parser is None else lambda: OutputReader(None, parser())
        continued = bool(request.continue_final_message) and marks.left_open_in(_last(request))
        opened = marks.begun_by(prompt) or continued
        return lambda: OutputReader(ThinkParser(opened, marks), parser() if parser else None)


def new_call_id() -> str:
    """Nine letters and digits, which Mistral's templates insist on; other models take any id."""
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


def _last(request: ChatRequest) -> str:
    last: Message = request.messages[-1]
    return last.content or ""


def _variables(request: ChatRequest | TokenizeRequest, template: ChatTemplate) -> dict[str, Any]:
    effort = request.reasoning_effort if isinstance(request, ChatRequest) else None
    variables: dict[str, Any] = {}
    if effort is not None:
        if "reasoning_effort" in template.variables:
            variables["reasoning_effort"] = effort
        elif "enable_thinking" in template.variables:
            variables["enable_thinking"] = effort != "none"
        elif effort != "none":
            raise ApiError(
                400,
                "reasoning_effort: this model's chat template knows no such thing: leave it out or give 'none'.",
                param="reasoning_effort",
                code="unsupported_parameter",
            )
    return variables | (request.chat_template_kwargs or {})
