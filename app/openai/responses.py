"""Response bodies: whole ones and the chunks of a stream, as plain dicts ready for JSON."""

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from json.encoder import encode_basestring
from typing import Any, ClassVar
from uuid import uuid4

from app.openai.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from app.openai.token_entries import TokenEntry

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

_MARK = f"text-{uuid4().hex}"
"""Stands where a text will be."""

Body = dict[str, Any]


@dataclass(slots=True)
class Usage:
    """Tokens of one answer. completion_tokens are those delivered, the EOS or stop token among them.

    A prompt counts once, however many outputs it has.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def add(self, other: "Usage | None") -> None:
        if other is None:
            return
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
class CallDelta:
    """Of a tool call: its id and name in the first, more of its arguments in each."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


@dataclass(slots=True)
class Part:
    """What is new of a choice; a stream has one in each chunk, a whole answer all of them in one."""

    content: str = ""
    reasoning: str = ""
    call: CallDelta | None = None
    entries: Sequence[TokenEntry] = ()
    token_ids: Sequence[int] = ()
    finish_reason: str | None = None

    @property
    def is_plain(self) -> bool:
        """Whether it brings text of the answer and nothing else."""
        return bool(self.content) and not (
            self.entries or self.token_ids or self.finish_reason or self.reasoning or self.call
        )


@dataclass(slots=True)
class Call:
    id: str
    name: str
    arguments: str


@dataclass(slots=True)
class Choice:
    """A choice as far as it has come. prompt_entries: of `prompt_logprobs`, where it was asked for."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    entries: list[TokenEntry] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    prompt_entries: list[TokenEntry] | None = None

    def add(self, part: Part) -> None:
        self.content += part.content
        self.reasoning += part.reasoning
        self.entries += part.entries
        self.token_ids += part.token_ids
        if part.call is not None:
            if part.call.name is not None:
                self.calls.append(Call(part.call.id or "", part.call.name, ""))
            self.calls[-1].arguments += part.call.arguments
        if part.finish_reason is not None:
            self.finish_reason = part.finish_reason


@dataclass(frozen=True, kw_only=True)
class Format(ABC):
    """The bodies of one answer; all of them carry the same id, time and model.

    logprobs, token_ids: whether they were asked for. prompts: token ids of each choice's prompt, with token_ids.
    """

    model: str
    include_usage: bool = False
    logprobs: bool = False
    token_ids: bool = False
    prompts: Sequence[Sequence[int]] = ()
    created: int = field(default_factory=lambda: int(time.time()))
    unique: str = field(default_factory=lambda: uuid4().hex)
    _around_text: dict[int, tuple[bytes, bytes]] = field(default_factory=dict, init=False, repr=False, compare=False)
    prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    @property
    def id(self) -> str:
        return f"{self.prefix}-{self.unique}"

    @abstractmethod
    def opening(self, index: int) -> list[Body]:
        """Chunks before the first part of a choice."""

    @abstractmethod
    def chunk(self, index: int, part: Part) -> Body:
        """A chunk with more of a choice, or with why it ended."""

    def text_event(self, index: int, text: str) -> bytes:
        """`event(self.chunk(index, Part(text)))`, a third of whose time it takes: only the text is new in it."""
        around = self._around_text.get(index)
        if around is None:
            before, after = event(self.chunk(index, Part(_MARK))).split(to_json(_MARK))
            around = self._around_text[index] = before, after
        return around[0] + encode_basestring(text).encode() + around[1]

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

    def _chunk(self, choice: Body, token_ids: Sequence[int]) -> Body:
        if self.token_ids:
            choice["token_ids"] = list(token_ids)
        chunk = {**self._chunk_head, "choices": [choice]}
        return chunk | {"usage": None} if self.include_usage else chunk

    @cached_property
    def _chunk_head(self) -> Body:
        return self._envelope(self.chunk_object)

    def _envelope(self, kind: str) -> Body:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


class ChatFormat(Format):
    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self, index: int) -> list[Body]:
        chunk = self._delta(index, {"role": "assistant", "content": ""})
        if self.token_ids:
            chunk["prompt_token_ids"] = list(self.prompts[0])
        return [chunk]

    def chunk(self, index: int, part: Part) -> Body:
        delta: Body = {}
        if part.content:
            delta["content"] = part.content
        if part.reasoning:
            delta["reasoning_content"] = part.reasoning
        if part.call is not None:
            delta["tool_calls"] = [_call_delta(part.call)]
        return self._delta(index, delta, part)

    def whole(self, choices: Sequence[Choice], usage: Usage) -> Body:
        body = super().whole(choices, usage)
        if self.token_ids:
            body["prompt_token_ids"] = list(self.prompts[0])
        if choices[0].prompt_entries is not None:
            body["prompt_logprobs"] = prompt_logprobs(choices[0].prompt_entries)
        return body

    def _delta(self, index: int, delta: Body, part: Part | None = None) -> Body:
        logprobs = chat_logprobs(part.entries) if part is not None and part.entries else None
        reason = None if part is None else part.finish_reason
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return self._chunk(choice, () if part is None else part.token_ids)

    def _choice(self, index: int, choice: Choice) -> Body:
        # No text at all is null beside a call or a thought, and "" on its own.
        content = choice.content or (None if choice.calls or choice.reasoning else "")
        message: Body = {"role": "assistant", "content": content, "refusal": None}
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        if choice.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in choice.calls
            ]
        body = {
            "index": index,
            "message": message,
            "logprobs": chat_logprobs(choice.entries) if self.logprobs else None,
            "finish_reason": choice.finish_reason,
        }
        return body | {"token_ids": choice.token_ids} if self.token_ids else body


def _call_delta(call: CallDelta) -> Body:
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


class CompletionFormat(Format):
    prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def opening(self, index: int) -> list[Body]:
        if not self.token_ids:
            return []
        chunk = self.chunk(index, Part())
        chunk["choices"][0]["prompt_token_ids"] = list(self.prompts[index])
        return [chunk]

    def chunk(self, index: int, part: Part) -> Body:
        logprobs = completion_logprobs(part.entries) if part.entries else None
        return self._chunk(_completion_choice(index, part.content, logprobs, part.finish_reason), part.token_ids)

    def _choice(self, index: int, choice: Choice) -> Body:
        logprobs = completion_logprobs(choice.entries) if self.logprobs else None
        body = _completion_choice(index, choice.content, logprobs, choice.finish_reason)
        if choice.prompt_entries is not None:
            body["prompt_logprobs"] = prompt_logprobs(choice.prompt_entries)
        if self.token_ids:
            body |= {"token_ids": choice.token_ids, "prompt_token_ids": list(self.prompts[index])}
        return body


def _completion_choice(index: int, text: str, logprobs: Body | None, reason: str | None) -> Body:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def model_card(name: str, created: int, max_model_len: int, root: str, parent: str | None) -> Body:
    """An entry of /v1/models. root: an adapter's folder, or the model's name; parent: an adapter's model."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "nanoserve",
        "root": root,
        "parent": parent,
        "max_model_len": max_model_len,
    }


_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode
"""`json.dumps` would make an encoder for each event, which takes longer than the event."""


def to_json(body: Body | str) -> bytes:
    return _encode(body).encode()


def event(body: Body, name: str | None = None) -> bytes:
    """One server-sent event; JSON has no raw line break, so one data line holds it."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + to_json(body) + b"\n\n"
