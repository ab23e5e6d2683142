"""The forms in which callers of `LLM` give prompts, chats and what goes with each: one, or a list of them.

All here raise `InvalidRequestError` for what is in none of these forms.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from engine.errors import InvalidRequestError
from engine.sampling_params import SamplingParams
from engine.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or vLLM's `{"prompt": text}` and `{"prompt_token_ids": ids}`."""

Message = Mapping[str, Any]


def read_prompt(prompt: Any, tokenizer: Tokenizer) -> tuple[str | None, list[int]]:
    """Text, if there is any, and token ids of a prompt in one of its forms."""
    text, ids = None, prompt
    if isinstance(prompt, Mapping):
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    elif isinstance(prompt, str):
        text, ids = prompt, None
    if ids is None and isinstance(text, str):
        ids = tokenizer.encode(text)
    if not isinstance(ids, Sequence) or isinstance(ids, str | bytes):
        raise InvalidRequestError(
            "a prompt is a string, a list of token ids, or a dict with prompt or prompt_token_ids, "
            f"not {type(prompt).__name__}.",
            "prompt",
        )
    return text, list(ids)


def listed(prompts: Any) -> Sequence[Any]:
    """The prompts as a list, where one came alone."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise InvalidRequestError(f"prompts is a prompt or a list of prompts, not {type(prompts).__name__}.", "prompt")
    return [prompts] if prompts and isinstance(prompts[0], int) else prompts


def listed_chats(messages: Any) -> Sequence[Any]:
    """The chats as a list, where one came alone."""
    if not isinstance(messages, Sequence):
        raise InvalidRequestError(
            f"messages is a list of messages or a list of such lists, not {type(messages).__name__}.", "messages"
        )
    return [messages] if messages and isinstance(messages[0], Mapping) else messages


def turns(chat: Any) -> list[dict[str, Any]]:
    """The messages of a chat, as a template wants them."""
    if not isinstance(chat, Sequence) or not chat or not all(isinstance(message, Mapping) for message in chat):
        raise InvalidRequestError(
            "a chat is a list of messages, at least one, each of them a dict with role and content.", "messages"
        )
    return [dict(message) for message in chat]


def one_each(name: str, given: Any, kind: Any, count: int) -> list[Any]:
    """A value of a kind for each prompt, where one is given for all or a list of them."""
    if isinstance(given, kind):
        return [given] * count
    if not isinstance(given, Sequence) or not all(isinstance(one, kind) for one in given):
        wanted = "SamplingParams" if kind is SamplingParams else "LoRARequest"
        raise InvalidRequestError(f"{name} takes {wanted}, one or a list of them, not {type(given).__name__}.", name)
    if len(given) != count:
        raise InvalidRequestError(
            f"{name} has {len(given)} entries for {count} prompts: give one for all, or one for each.", name
        )
    return list(given)


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Put `what` before the message of an `InvalidRequestError`, which stays of its kind."""
    try:
        yield
    except InvalidRequestError as error:
        error.args = (f"{what}: {error}",)
        raise
