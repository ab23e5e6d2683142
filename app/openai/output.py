"""How the output of a chat is to be read: which thoughts and calls may be in it."""

from dataclasses import dataclass

from app.openai.parsing import Content, Event
from app.openai.reasoning import ThinkParser
from app.openai.tool_parser import ToolParser


@dataclass(frozen=True, slots=True)
class OutputReader:
    """A thought first, if there is one, and then calls in what is left. Either parser may be missing."""

    thoughts: ThinkParser | None
    calls: ToolParser | None

    @property
    def needs_special_tokens(self) -> bool:
        """Whether marks that it looks for are special tokens, which must then not be left out of the text."""
        return (self.calls is not None and self.calls.needs_special_tokens) or (
            self.thoughts is not None and self.thoughts.marks.special
        )

    def feed(self, text: str) -> list[Event]:
        if not text:
            return []
        return self._in_calls([Content(text)] if self.thoughts is None else self.thoughts.feed(text))

    def finish(self) -> list[Event]:
        events = [] if self.thoughts is None else self._in_calls(self.thoughts.finish())
        return events if self.calls is None else [*events, *self.calls.finish()]

    def _in_calls(self, events: list[Event]) -> list[Event]:
        if self.calls is None:
            return events
        read: list[Event] = []
        for event in events:
            read += self.calls.feed(event.text) if isinstance(event, Content) else [event]
        return read
