"""The turns of a chat, as clients send them and as chat templates take them."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, WithJsonSchema, field_validator, model_validator
from pydantic_core import from_json

from app.openai.model import RequestModel

MAX_TOOL_CALLS = 128

_UNSUPPORTED = ("function_call", "audio")


def _part_text(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        raise ValueError(f"only parts of type 'text' are supported, got {kind or part!r}")
    if not isinstance(part.get("text"), str):
        raise ValueError("a text part needs a string in 'text'")
    return str(part["text"])


def _join_parts(content: Any) -> Any:
    return "\n".join(_part_text(part) for part in content) if isinstance(content, list) and content else content


_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}

Text = Annotated[
    str | None,
    BeforeValidator(_join_parts),
    Field(validate_default=True),
    WithJsonSchema(
        {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": _TEXT_PART}, {"type": "null"}]}
    ),
]
"""A string; or text parts, joined by a line break."""


class FunctionCall(RequestModel):
    name: Annotated[str, Field(min_length=1)]
    arguments: str

    def for_template(self) -> dict[str, Any]:
        """Templates write the arguments as JSON themselves; what is no object stays the text it is."""
        try:
            arguments = from_json(self.arguments or "{}", allow_inf_nan=False)
        except ValueError:
            arguments = None
        return {"name": self.name, "arguments": arguments if isinstance(arguments, dict) else self.arguments}


class ToolCall(RequestModel):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall

    def for_template(self) -> dict[str, Any]:
        identity = {} if self.id is None else {"id": self.id}
        return identity | {"type": self.type, "function": self.function.for_template()}


class Message(RequestModel):
    """One turn. Fields that a template may want are handed on to it: `name`, tool calls, reasoning."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOL_CALLS, fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    content: Text = None

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, message: Any) -> Any:
        if isinstance(message, dict):
            for name in _UNSUPPORTED:
                if message.get(name):
                    raise ValueError(f"{name} in a message is not supported by this server")
            if "reasoning" in message:  # what newer vLLM clients call it
                return {"reasoning_content": message["reasoning"]} | message
        return message

    @field_validator("content")
    @classmethod
    def _only_calls_need_no_text(cls, content: str | None, info: ValidationInfo) -> str | None:
        called = info.data.get("role") == "assistant" and info.data.get("tool_calls")
        if content is None and not called:
            raise ValueError("must be a string or a list of text parts; only an assistant with tool_calls needs none")
        return content

    @model_validator(mode="after")
    def _fields_of_the_role(self) -> "Message":
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("a message with role 'tool' needs a tool_call_id")
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls are for messages with role 'assistant', not {self.role!r}")
        return self

    def for_template(self, developer: str = "system") -> dict[str, Any]:
        """developer: the template's name of that role, OpenAI's newer one of `system`."""
        message: dict[str, Any] = {
            "role": developer if self.role == "developer" else self.role,
            # Not None, which templates that know nothing of tools would stumble over.
            "content": self.content or "",
        }
        for name in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return message
