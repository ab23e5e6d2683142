"""What the parsers of model output share: the events they make, and a reader of text that comes in pieces."""

from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the person who asked."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model wrote to itself."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins; what follows up to the next `CallStart` or `CallEnd` are its arguments."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of the last call's arguments."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The arguments of the last call are complete."""


Event = Content | Reasoning | CallStart | CallArguments | CallEnd

Steps = Generator[None, None, None]
"""A parser's run: it stops wherever it needs text that has not come yet."""


class MalformedError(Exception):
    """The text is not what was expected at this place."""


class Reader:
    """Text that comes in pieces, read from `position`.

    keep: where text begins that may be wanted again; None if all before `position` may go. Both are places in `text`,
    which change when text is appended: only these two are kept right.
    """

    def __init__(self) -> None:
        self._text = ""
        self._ended = False
        self.position = 0
        self.keep: int | None = None

    def append(self, text: str) -> None:
        cut = self.position if self.keep is None else self.keep
        self._text = self._text[cut:] + text
        self.position -= cut
        self.keep = None if self.keep is None else 0

    def end(self) -> None:
        self._ended = True

    @property
    def text(self) -> str:
        """All that is known, from some place before `position` on."""
        return self._text

    @property
    def rest(self) -> str:
        return self._text[self.position :]

    def ahead(self, count: int) -> str:
        """Up to `count` of the next characters, as far as they are known."""
        return self._text[self.position : self.position + count]

    def fill(self) -> Generator[None, None, bool]:
        """Wait until there is a character to read; False at the end of the text."""
        while self.position >= len(self._text):
            if self._ended:
                return False
            yield
        return True

    def more(self) -> Generator[None, None, bool]:
        """Wait for text beyond what is known; False if none comes."""
        known = len(self._text) - self.position
        while len(self._text) - self.position <= known:
            if self._ended:
                return False
            yield
        return True

    def peek(self) -> Generator[None, None, str]:
        """The next character, not taken; "" at the end."""
        return self._text[self.position] if (yield from self.fill()) else ""

    def skip_space(self) -> Generator[None, None, str]:
        """Take white space; returns the character after it, not taken."""
        while (yield from self.fill()):
            character = self._text[self.position]
            if not character.isspace():
                return character
            self.position += 1
        return ""

    def starts_with(self, marker: str) -> Generator[None, None, bool]:
        """Whether `marker` comes next; waits no longer than it takes to know."""
        while len(ahead := self.ahead(len(marker))) < len(marker):
            if not marker.startswith(ahead) or not (yield from self.more()):
                return False
        return ahead == marker

    def take(self, marker: str) -> Generator[None, None, bool]:
        """As `starts_with`, and take it if so."""
        if found := (yield from self.starts_with(marker)):
            self.position += len(marker)
        return found


def held_back(text: str, marker: str) -> int:
    """Length of the longest end of `text` with which `marker` begins; less than the whole marker."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0


class StreamParser(ABC):
    """Makes events of text, however it is cut: the same text gives the same events, joined.

    Written as one run over a `Reader`, as if all the text were there.
    """

    def __init__(self) -> None:
        self.reader = Reader()
        self._events: list[Event] = []
        self._run: Steps | None = self.run()

    @abstractmethod
    def run(self) -> Steps:
        """Parse to the end of the text, calling `emit`."""

    def emit(self, event: Event) -> None:
        self._events.append(event)

    def feed(self, text: str) -> list[Event]:
        self.reader.append(text)
        return self._advance()

    def finish(self) -> list[Event]:
        """No more text comes; what was held back is told now."""
        self.reader.end()
        return self._advance()

    def _advance(self) -> list[Event]:
        if self._run is not None:
            try:
                next(self._run)
            except StopIteration:
                self._run = None
        events, self._events = self._events, []
        return events
