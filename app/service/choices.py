"""From the deltas of one output to the parts of its choice: plain text, or text with calls and thoughts in it."""

from abc import ABC, abstractmethod
from collections.abc import Callable

from app.openai.output import OutputReader
from app.openai.parsing import CallArguments, CallEnd, CallStart, Content, Event, Reasoning
from app.openai.responses import CallDelta, Choice, Part
from app.service.generation import Delta
from engine.outputs import FinishReason


class Assembler(ABC):
    """Makes the parts of one choice; those of all its deltas, added up, are the whole choice."""

    @abstractmethod
    def take(self, delta: Delta) -> list[Part]: ...

    def add(self, delta: Delta, choice: Choice) -> None:
        for part in self.take(delta):
            choice.add(part)


class PlainText(Assembler):
    """Text as it comes."""

    def add(self, delta: Delta, choice: Choice) -> None:
        """The same with no part in between, which at each token is half of what a whole answer costs."""
        choice.content += delta.text
        if delta.entries:
            choice.entries += delta.entries
        if delta.token_ids:
            choice.token_ids += delta.token_ids
        if delta.finish_reason is not None:
            choice.finish_reason = delta.finish_reason

    def take(self, delta: Delta) -> list[Part]:
        parts = []
        if delta.text or delta.entries or delta.token_ids:
            parts.append(Part(delta.text, entries=delta.entries, token_ids=delta.token_ids))
        if delta.finish_reason is not None:
            parts.append(Part(finish_reason=delta.finish_reason))
        return parts


class Echo(Assembler):
    """The prompt before its output, with its log probabilities if they were asked for."""

    def __init__(self, prompt: str) -> None:
        self._prompt: str | None = prompt
        self._rest = PlainText()

    def take(self, delta: Delta) -> list[Part]:
        parts = self._rest.take(delta)
        if self._prompt is not None:
            parts.insert(0, Part(self._prompt, entries=delta.prompt_entries))
            self._prompt = None
        return parts


class ParsedText(Assembler):
    """Text with tool calls and thoughts in it.

    new_id: makes the id of a call. only_one: whether calls after the first are left out.
    """

    def __init__(self, reader: OutputReader, new_id: Callable[[], str], only_one: bool) -> None:
        self._reader = reader
        self._new_id = new_id
        self._only_one = only_one
        self._calls = 0
        self._complete = 0
        self._waiting = Part()  # entries and token ids whose text is held back

    def take(self, delta: Delta) -> list[Part]:
        events = self._reader.feed(delta.text)
        if delta.finish_reason is not None:
            events += self._reader.finish()
        parts: list[Part] = []
        for event in events:
            self._add(event, parts)
        self._waiting.entries = [*self._waiting.entries, *delta.entries]
        self._waiting.token_ids = [*self._waiting.token_ids, *delta.token_ids]
        if delta.finish_reason is not None:
            parts.append(Part(finish_reason=self._reason(delta.finish_reason)))
        if parts:
            parts[0].entries, parts[0].token_ids = self._waiting.entries, self._waiting.token_ids
            self._waiting = Part()
        return parts

    def _add(self, event: Event, parts: list[Part]) -> None:
        """Add to the last part what goes with it, or begin another."""
        last = parts[-1] if parts else None
        if isinstance(event, CallStart | CallArguments | CallEnd):
            self._add_call(event, parts)
        elif isinstance(event, Content):
            if last is not None and last.content:
                last.content += event.text
            else:
                parts.append(Part(content=event.text))
        elif isinstance(event, Reasoning):
            if last is not None and last.reasoning:
                last.reasoning += event.text
            else:
                parts.append(Part(reasoning=event.text))

    def _add_call(self, event: CallStart | CallArguments | CallEnd, parts: list[Part]) -> None:
        if isinstance(event, CallStart):
            self._calls += 1
        if self._only_one and self._calls > 1:
            return
        index = self._calls - 1
        match event:
            case CallStart(name):
                parts.append(Part(call=CallDelta(index, "", self._new_id(), name)))
            case CallArguments(text):
                last = parts[-1].call if parts else None
                if last is not None and last.index == index and last.name is None:
                    parts[-1].call = CallDelta(index, last.arguments + text)
                else:
                    parts.append(Part(call=CallDelta(index, text)))
            case CallEnd():
                self._complete += 1

    def _reason(self, reason: str) -> str:
        return "tool_calls" if reason == FinishReason.STOP and self._complete else reason
