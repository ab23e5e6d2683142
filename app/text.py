"""Prompts to token ids, without holding up the event loop for long ones."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from engine.errors import ContextLengthError, InvalidRequestError
from engine.tokenizer import Tokenizer

T = TypeVar("T")

INLINE_SIZE = 8_192
"""Characters that are tokenised in the event loop, in about 7 ms; more of them go to a thread."""


async def off_loop(function: Callable[..., T], size: int, *args: Any) -> T:
    """`function(*args)`, in a thread if `size`, in characters, bytes or tokens, says that it takes long."""
    return function(*args) if size <= INLINE_SIZE else await asyncio.to_thread(function, *args)


class PromptEncoder:
    """Makes token ids of what a request brings, and refuses what could not run.

    max_total_tokens: prompt plus output of one request. vocab_size: token ids that the model knows.
    """

    def __init__(self, tokenizer: Tokenizer, max_total_tokens: int, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._max_total_tokens = max_total_tokens
        self._vocab_size = vocab_size

    async def chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Raises `InvalidRequestError` for what the template refuses, `ContextLengthError`."""
        size = sum(len(message["content"]) for message in messages)
        return self._checked(await off_loop(self._tokenizer.apply_chat_template, size, messages), "messages")

    async def prompts(self, prompts: Sequence[str] | Sequence[list[int]]) -> list[list[int]]:
        """Texts, or token ids, which are taken as they are. Raises `InvalidRequestError`, `ContextLengthError`."""
        return await off_loop(self._encode_all, sum(map(len, prompts)), prompts)

    def _encode_all(self, prompts: Sequence[str] | Sequence[list[int]]) -> list[list[int]]:
        return [
            self._checked(self._tokenizer.encode(p) if isinstance(p, str) else self._in_vocabulary(p), "prompt")
            for p in prompts
        ]

    def _in_vocabulary(self, ids: list[int]) -> list[int]:
        if (worst := min(ids)) < 0 or (worst := max(ids)) >= self._vocab_size:
            raise InvalidRequestError(
                f"prompt: {worst} is no token id; they go from 0 to {self._vocab_size - 1}.", "prompt"
            )
        return ids

    def _checked(self, ids: list[int], param: str) -> list[int]:
        if not ids:
            raise InvalidRequestError(f"{param}: there is no token in it, and the model needs at least one.", param)
        if len(ids) >= self._max_total_tokens:
            error = ContextLengthError(len(ids), self._max_total_tokens)
            error.param = param
            raise error
        return ids
