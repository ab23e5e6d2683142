"""Request bodies of /v1/chat/completions and /v1/completions: strict about types, deaf to unknown fields."""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, field_validator, model_validator
from pydantic_core import from_json

from app.openai.errors import ApiError, from_validation_error
from app.openai.unsupported import CHAT, COMPLETIONS, refuse_unsupported
from engine.sampling_params import SamplingParams

DEFAULT_COMPLETION_TOKENS = 16
"""What /v1/completions makes when max_tokens is not given; a chat goes on to its end or the context's."""

MAX_PROMPTS = 2048
"""Prompts in one completions request; OpenAI's limit."""

_SAMPLING_FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "stop", "stop_token_ids", "ignore_eos",
    "include_stop_str_in_output", "skip_special_tokens",
)  # fmt: skip


class _Model(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)


class StreamOptions(_Model):
    include_usage: bool | None = None


class GenerationRequest(_Model):
    """What both endpoints take. None is "not given", as OpenAI's own clients send it."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _usage_only_in_streams(self) -> "GenerationRequest":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is for streams: set stream to true or leave it out")
        return self

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def _params(self, max_tokens: int | None) -> SamplingParams:
        """Raises `InvalidRequestError` that names the field that is out of range."""
        given = {name: getattr(self, name) for name in _SAMPLING_FIELDS}
        return SamplingParams(
            max_tokens=max_tokens, **{name: value for name, value in given.items() if value is not None}
        )


class Message(_Model):
    """One turn, its content as text; `name` is taken and not used, since chat templates have no place for it."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str

    @model_validator(mode="before")
    @classmethod
    def _no_tools(cls, message: Any) -> Any:
        if isinstance(message, dict):
            for name in ("tool_calls", "function_call", "audio"):
                if message.get(name):
                    raise ValueError(f"{name} in a message is not supported by this server")
        return message

    @field_validator("content", mode="before")
    @classmethod
    def _join_parts(cls, content: Any) -> Any:
        return "\n".join(_part_text(part) for part in content) if isinstance(content, list) and content else content

    def for_template(self) -> dict[str, str]:
        """Chat templates know `system`, which `developer` is OpenAI's newer name of."""
        return {"role": "system" if self.role == "developer" else self.role, "content": self.content}


def _part_text(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        raise ValueError(f"only parts of type 'text' are supported, got {kind or part!r}")
    if not isinstance(part.get("text"), str):
        raise ValueError("a text part needs a string in 'text'")
    return str(part["text"])


class ChatRequest(GenerationRequest):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = None

    def sampling_params(self) -> SamplingParams:
        return self._params(self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens)


def _prompts(prompt: Any) -> list[str] | list[list[int]]:
    """The four shapes that OpenAI takes as a list of prompts."""
    prompts: list[Any] = [prompt] if isinstance(prompt, str) or _is_ids(prompt) else prompt
    if not isinstance(prompts, list) or not prompts:
        raise ValueError(
            "give a string, a list of strings, a list of token ids, or a list of such lists; not an empty one"
        )
    if len(prompts) > MAX_PROMPTS:
        raise ValueError(f"at most {MAX_PROMPTS} prompts in one request, not {len(prompts)}")
    if not (all(isinstance(item, str) for item in prompts) or all(_is_ids(item) for item in prompts)):
        raise ValueError("prompts must be all strings or all lists of token ids (whole numbers, at least one)")
    return prompts


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


class CompletionRequest(GenerationRequest):
    prompt: Annotated[list[str] | list[list[int]], PlainValidator(_prompts)]
    max_tokens: int | None = None
    echo: bool | None = None

    @property
    def generates(self) -> bool:
        """False for max_tokens 0, the call that only reads the prompt."""
        return self.max_tokens != 0

    def sampling_params(self) -> SamplingParams:
        limit = DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        return self._params(limit if self.generates else 1)


T = TypeVar("T", bound=GenerationRequest)


def parse_chat(body: bytes) -> ChatRequest:
    """Raises `ApiError` 400 that names the field."""
    return _validate(ChatRequest, _object(body), CHAT)


def parse_completion(body: bytes) -> CompletionRequest:
    """Raises `ApiError` 400 that names the field."""
    return _validate(CompletionRequest, _object(body), COMPLETIONS)


def _object(body: bytes) -> dict[str, Any]:
    """JSON text to an object. Half of a surrogate pair, NaN and Infinity are no JSON, and refused here."""
    try:
        parsed = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"The body is not valid JSON: {error}.", code="invalid_json") from None
    if not isinstance(parsed, dict):
        raise ApiError(400, "The body must be a JSON object.", code="invalid_json")
    return parsed


def _validate(model: type[T], body: dict[str, Any], unsupported: dict[str, tuple[Any, ...]]) -> T:
    refuse_unsupported(body, unsupported)
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise from_validation_error(error) from None
