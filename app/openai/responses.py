"""Response bodies: whole ones and the chunks of a stream, as plain dicts ready for JSON."""

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar
from uuid import uuid4

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

Body = dict[str, Any]


@dataclass(slots=True)
class Usage:
    """Tokens of one answer. completion_tokens are those delivered, the EOS or stop token among them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def add(self, other: "Usage") -> None:
        self.prompt_tokens += other.prompt_tokens
        self.completion_tokens += other.completion_tokens
        self.cached_tokens += other.cached_tokens

    def body(self) -> Body:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished answer."""

    text: str
    finish_reason: str


@dataclass(frozen=True, kw_only=True)
class Format(ABC):
    """The bodies of one answer; all of them carry the same id, time and model."""

    model: str
    include_usage: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    unique: str = field(default_factory=lambda: uuid4().hex)
    prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    @property
    def id(self) -> str:
        return f"{self.prefix}-{self.unique}"

    @abstractmethod
    def opening(self, index: int) -> list[Body]:
        """Chunks before the first text of a choice."""

    @abstractmethod
    def text(self, index: int, text: str) -> Body:
        """A chunk with more text of a choice."""

    @abstractmethod
    def finish(self, index: int, reason: str) -> Body:
        """A choice's last chunk: no text, and why it ended."""

    def usage(self, usage: Usage) -> Body:
        """The last chunk of a stream whose client asked for it: no choices."""
        return self._envelope(self.chunk_object) | {"choices": [], "usage": usage.body()}

    def whole(self, choices: Sequence[Choice], usage: Usage) -> Body:
        return self._envelope(self.whole_object) | {
            "choices": [self._choice(index, choice) for index, choice in enumerate(choices)],
            "usage": usage.body(),
        }

    @abstractmethod
    def _choice(self, index: int, choice: Choice) -> Body:
        """A choice of a whole answer."""

    def _chunk(self, choice: Body) -> Body:
        chunk = self._envelope(self.chunk_object) | {"choices": [choice]}
        return chunk | {"usage": None} if self.include_usage else chunk

    def _envelope(self, kind: str) -> Body:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


class ChatFormat(Format):
    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self, index: int) -> list[Body]:
        return [self._delta(index, {"role": "assistant", "content": ""})]

    def text(self, index: int, text: str) -> Body:
        return self._delta(index, {"content": text})

    def finish(self, index: int, reason: str) -> Body:
        return self._delta(index, {}, reason)

    def _delta(self, index: int, delta: Body, reason: str | None = None) -> Body:
        return self._chunk({"index": index, "delta": delta, "logprobs": None, "finish_reason": reason})

    def _choice(self, index: int, choice: Choice) -> Body:
        return {
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": None,
            "finish_reason": choice.finish_reason,
        }


class CompletionFormat(Format):
    prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def opening(self, index: int) -> list[Body]:
        return []

    def text(self, index: int, text: str) -> Body:
        return self._chunk(self._choice(index, Choice(text, "")) | {"finish_reason": None})

    def finish(self, index: int, reason: str) -> Body:
        return self._chunk(self._choice(index, Choice("", reason)))

    def _choice(self, index: int, choice: Choice) -> Body:
        return {"index": index, "text": choice.text, "logprobs": None, "finish_reason": choice.finish_reason}


def model_card(name: str, created: int, max_model_len: int) -> Body:
    """An entry of /v1/models."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "nanoserve",
        "max_model_len": max_model_len,
    }


def to_json(body: Body) -> bytes:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def event(body: Body, name: str | None = None) -> bytes:
    """One server-sent event; JSON has no raw line break, so one data line holds it."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + to_json(body) + b"\n\n"
