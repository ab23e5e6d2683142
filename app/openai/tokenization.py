"""The bodies of /tokenize and /detokenize, as vLLM has them."""

from typing import Annotated, Any

from pydantic import Field, model_validator

from app.openai.chat_request import MAX_MESSAGES
from app.openai.messages import Message
from app.openai.model import RequestModel
from app.openai.sampling import TokenId
from app.openai.tools import MAX_TOOLS, Tool

MAX_CHARACTERS = 1_000_000
"""Of a text to tokenise, which takes a second and a hundred times its memory; the longest contexts have as many."""

MAX_TOKENS = 1_000_000


class TokenizeRequest(RequestModel):
    """A prompt, or the messages of a chat.

    add_special_tokens: true by default for a prompt, false for a chat, whose template writes them.
    """

    model: str | None = None
    prompt: Annotated[str, Field(max_length=MAX_CHARACTERS)] | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt cannot both be true")
        return self


class DetokenizeRequest(RequestModel):
    model: str | None = None
    tokens: Annotated[list[TokenId], Field(max_length=MAX_TOKENS, fail_fast=True)]
