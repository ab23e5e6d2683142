"""Log probabilities in the forms of the API: of chats, of completions, and of prompts as vLLM has them."""

import math
from collections.abc import Sequence
from typing import Any

from app.openai.token_entries import TokenEntry
from engine.text.token_text import TokenText

Body = dict[str, Any]

LOWEST = -9999.0
"""In place of what JSON has no number for; OpenAI's and vLLM's own."""


def chat_logprobs(entries: Sequence[TokenEntry]) -> Body:
    return {
        "content": [
            _chat_token(entry.token, entry.logprob)
            | {"top_logprobs": [_chat_token(token, logprob) for _, token, logprob in entry.top or ()]}
            for entry in entries
        ],
        "refusal": None,
    }


def _chat_token(token: TokenText, logprob: float | None) -> Body:
    return {
        "token": token.text,
        "logprob": _number(logprob),
        "bytes": None if token.data is None else list(token.data),
    }


def completion_logprobs(entries: Sequence[TokenEntry]) -> Body:
    """Parallel lists. The token itself is among `top_logprobs`, also where it is none of the most likely."""
    return {
        "tokens": [entry.token.text for entry in entries],
        "token_logprobs": [None if entry.logprob is None else _number(entry.logprob) for entry in entries],
        "top_logprobs": [_by_text(entry) for entry in entries],
        "text_offset": [entry.offset for entry in entries],
    }


def _by_text(entry: TokenEntry) -> dict[str, float] | None:
    if entry.top is None:
        return None
    # Of two tokens that read the same, the likelier is kept; the token itself in any case.
    texts = {token.text: _number(logprob) for _, token, logprob in reversed(entry.top)}
    return texts | {entry.token.text: _number(entry.logprob)}


def prompt_logprobs(entries: Sequence[TokenEntry]) -> list[Body | None]:
    """By token id; null for the first token."""
    return [None if entry.top is None else _by_id(entry) for entry in entries]


def _by_id(entry: TokenEntry) -> Body:
    """The token itself first, then the most likely."""
    shown = {str(entry.token_id): _scored(entry.token, entry.logprob, entry.rank)}
    for rank, (token_id, token, logprob) in enumerate(entry.top or (), start=1):
        shown.setdefault(str(token_id), _scored(token, logprob, rank))
    return shown


def _scored(token: TokenText, logprob: float | None, rank: int) -> Body:
    return {"logprob": _number(logprob), "rank": rank, "decoded_token": token.text}


def _number(logprob: float | None) -> float:
    return LOWEST if logprob is None or not math.isfinite(logprob) else max(logprob, LOWEST)
