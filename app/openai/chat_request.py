"""The body of /v1/chat/completions."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from app.openai.messages import Message
from app.openai.sampling import MAX_TOKENS, GenerationRequest
from app.openai.structured import Structure, of_schema
from app.openai.tools import MAX_TOOLS, NamedChoice, Tool, ToolChoice, calls_schema
from engine.errors import InvalidRequestError
from engine.sampling_params import MAX_LOGPROBS, SamplingParams

MAX_MESSAGES = 2048

OutputLimit = Annotated[int, Field(ge=1, le=MAX_TOKENS)]

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class ChatRequest(GenerationRequest):
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_tokens: OutputLimit | None = None
    max_completion_tokens: OutputLimit | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs to be true", "top_logprobs")
        if self.continue_final_message:
            if self.add_generation_prompt:
                raise InvalidRequestError(
                    "continue_final_message and add_generation_prompt cannot both be true", "continue_final_message"
                )
            if self.messages[-1].role == "tool" or self.messages[-1].tool_calls:
                raise InvalidRequestError(
                    "continue_final_message needs a last message of text, not of tool calls or results",
                    "continue_final_message",
                )
        self._check_tools()
        return self

    def _check_tools(self) -> None:
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise InvalidRequestError("tools: two functions have the same name", "tools")
        if isinstance(self.tool_choice, NamedChoice) and self.tool_choice.function.name not in names:
            name = self.tool_choice.function.name[:128]
            raise InvalidRequestError(f"tool_choice: there is no function {name!r} in tools", "tool_choice")
        if self.tool_choice == "required" and not names:
            raise InvalidRequestError("tool_choice is 'required', but tools has none", "tool_choice")

    @property
    def offered_tools(self) -> list[Tool]:
        """Those that the model may call, and so is told of."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def forced_tools(self) -> list[Tool]:
        """Those of which one must be called; none if the model may choose not to."""
        match self.tool_choice:
            case NamedChoice(function=function):
                return [tool for tool in self.offered_tools if tool.function.name == function.name]
            case "required":
                return self.offered_tools
        return []

    def structure(self) -> Structure | None:
        """What the output is held to: a form, or the calls that are demanded."""
        form, tools = super().structure(), self.forced_tools
        if not tools:
            return form
        if form is not None:
            raise InvalidRequestError(
                f"tool_choice demands a call, so the output cannot have the form of {form.param}: give one of them.",
                "tool_choice",
            )
        if isinstance(self.tool_choice, NamedChoice):
            return Structure("tools", lambda: of_schema(tools[0].function.arguments_schema()))
        at_most_one = self.parallel_tool_calls is False
        return Structure("tools", lambda: of_schema(calls_schema(tools, at_most_one)))

    def sampling_params(
        self, drawn_seed: int | None = None, defaults: Mapping[str, Any] | None = None
    ) -> SamplingParams:
        """drawn_seed: for a request that gives none; defaults: the model's. Raises `InvalidRequestError`."""
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self._params(drawn_seed, defaults, max_tokens=limit, logprobs=logprobs)
