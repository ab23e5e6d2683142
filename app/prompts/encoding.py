"""Prompts to token ids, without holding up the event loop for long ones."""

from collections.abc import Sequence

from app.off_loop import INLINE_SIZE, off_loop
from app.openai.errors import CONTEXT_LENGTH, ApiError
from app.prompts.chat_template import Chat, ChatTemplate
from engine.errors import ContextLengthError, InvalidRequestError
from engine.text.tokenizer import Tokenizer

_TURN_SIZE = 16
"""What a message costs beside its content, in the same measure: the template runs over each."""


class PromptEncoder:
    """Makes token ids of what a request brings, and refuses what could not run.

    max_total_tokens: prompt plus output of one request. vocab_size: token ids that the model knows.
    """

    def __init__(self, tokenizer: Tokenizer, max_total_tokens: int, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._max_total_tokens = max_total_tokens
        self._vocab_size = vocab_size

    async def chat(self, template: ChatTemplate, chat: Chat) -> tuple[str, list[int]]:
        """The prompt's text and token ids. BOS is there only if the template writes it.

        Raises `InvalidRequestError` for what the template refuses;
        `ContextLengthError`, or `ApiError` in its place for what is far too long.
        """
        return await off_loop(self._encode_chat, _size(chat), template, chat)

    async def render(self, template: ChatTemplate, chat: Chat) -> str:
        """The prompt's text alone."""
        return await off_loop(template.render, _size(chat), chat)

    async def prompts(self, prompts: Sequence[str] | Sequence[list[int]]) -> list[list[int]]:
        """Texts, or token ids, which are taken as they are. Raises as `chat` does."""
        return await off_loop(self._encode_all, sum(map(len, prompts)), prompts)

    def _encode_chat(self, template: ChatTemplate, chat: Chat) -> tuple[str, list[int]]:
        text = self._short_enough(template.render(chat), "messages")
        return text, self._checked(self._tokenizer.encode(text, add_special_tokens=False), "messages")

    def _encode_all(self, prompts: Sequence[str] | Sequence[list[int]]) -> list[list[int]]:
        return [self._checked(self._encode(prompt), "prompt") for prompt in prompts]

    def _encode(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            return self._tokenizer.encode(self._short_enough(prompt, "prompt"))
        return self.in_vocabulary(prompt)

    def _short_enough(self, text: str, param: str) -> str:
        """Tokenising a megabyte takes a second and a hundred times its memory: not for what cannot fit."""
        fewest = self._tokenizer.fewest_tokens(text)
        if fewest >= self._max_total_tokens:
            raise ApiError(
                400,
                f"The prompt has {len(text)} characters, which are {fewest} tokens or more, but prompt and output "
                f"together may have at most {self._max_total_tokens}: shorten the prompt.",
                param=param,
                code=CONTEXT_LENGTH,
            )
        return text

    def in_vocabulary(self, ids: list[int], param: str = "prompt") -> list[int]:
        """`ids`. Raises `InvalidRequestError` if one of them is none."""
        if (worst := min(ids)) < 0 or (worst := max(ids)) >= self._vocab_size:
            raise InvalidRequestError(
                f"{param}: {worst} is no token id; they go from 0 to {self._vocab_size - 1}.", param
            )
        return ids

    def _checked(self, ids: list[int], param: str) -> list[int]:
        if not ids:
            raise InvalidRequestError(f"{param}: there is no token in it, and the model needs at least one.", param)
        if len(ids) >= self._max_total_tokens:
            raise ContextLengthError(len(ids), self._max_total_tokens, param)
        return ids


def _size(chat: Chat) -> int:
    """What rendering and tokenising costs, in characters. Tools and calls may be of any size, and are rare."""
    if chat.tools or any("tool_calls" in message for message in chat.messages):
        return INLINE_SIZE + 1
    return sum(len(message["content"]) + _TURN_SIZE for message in chat.messages)
