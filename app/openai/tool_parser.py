"""What the parsers of tool calls share: text up to a mark, and calls written as JSON objects.

A call is told as it is written: its name first, then its arguments piece by piece. Text that only looks like a call is
content, all of it; one whose arguments go wrong after they began stays open, and what follows them is content.
"""

import json
import re
from abc import abstractmethod
from collections.abc import Callable, Collection, Generator

from app.openai import json_stream
from app.openai.parsing import (
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Event,
    MalformedError,
    Steps,
    StreamParser,
    held_back,
)

_NAME = re.compile(r"[A-Za-z0-9_.\-]+")
_ARGUMENT_KEYS = ("arguments", "parameters")


class ToolParser(StreamParser):
    """tools: names of the functions that the request offers.

    White space next to a call goes with it.
    """

    special_marks: tuple[str, ...] = ()
    """Those marks of a call that are special tokens, which must then not be left out of the text: not before this."""

    def __init__(self, tools: Collection[str]) -> None:
        super().__init__()
        self.tools = tools
        self._space = ""
        self._after_call = False

    @property
    def needs_special_tokens(self) -> bool:
        return bool(self.special_marks)

    def emit(self, event: Event) -> None:
        if isinstance(event, CallStart):
            self.reader.keep = None
            self._space = ""
            self._after_call = True
        super().emit(event)

    def content(self, text: str) -> None:
        if self._after_call:
            text = text.lstrip()
        if not text:
            return
        self._after_call = False
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self.emit(Content(shown))

    def finish(self) -> list[Event]:
        events = super().finish()
        space, self._space = self._space, ""
        return [*events, Content(space)] if space else events

    def content_until(self, *markers: str) -> Generator[None, None, bool]:
        """Tell all up to the first of `markers`, which is not taken; False if there is none up to the end."""
        reader = self.reader
        while True:
            rest = reader.rest
            found = [at for marker in markers if (at := rest.find(marker)) >= 0]
            shown = min(found) if found else len(rest) - max(held_back(rest, marker) for marker in markers)
            self.content(rest[:shown])
            reader.position += shown
            if found:
                return True
            if not (yield from reader.more()):
                self.content(reader.rest)
                reader.position += len(reader.rest)
                return False

    def run(self) -> Steps:
        while (yield from self.content_until(*self.markers())):
            yield from self.attempt(self.calls())

    @abstractmethod
    def markers(self) -> tuple[str, ...]:
        """What a call may begin with."""

    @abstractmethod
    def calls(self) -> Steps:
        """Read what begins with a marker. Raises `MalformedError`."""

    def attempt(self, steps: Steps) -> Steps:
        """Run `steps`; what they have read and not told of is content if they fail, but for special tokens."""
        reader = self.reader
        reader.keep = reader.position
        try:
            yield from steps
        except MalformedError:
            if reader.keep is not None:
                text = reader.text[reader.keep : reader.position]
                for mark in self.special_marks:
                    text = text.replace(mark, "")
                self.content(text)
        reader.keep = None

    def call_object(self, *, known_only: bool = False) -> Steps:
        """Read `{"name": ..., "arguments": {...}}`, in either order, with `parameters` as another name of the second.

        Lenient about what comes after the arguments, since the call is whole by then.

        known_only: whether it must be a call of an offered tool with nothing else in it: for forms without a mark.
        """
        reader = self.reader
        name: str | None = None
        held: list[str] | None = None  # arguments that came before the name
        told = False
        yield from self._expect("{")
        while True:
            yield from reader.skip_space()
            key = yield from self._string()
            yield from reader.skip_space()
            yield from self._expect(":")
            after = yield from reader.skip_space()
            if key == "name" and name is None:
                name = yield from self._string()
                if not name.isprintable() or not name or (known_only and name not in self.tools):
                    raise MalformedError
                if held is not None:
                    self._tell(name, "".join(held))
                    told = True
            elif key in _ARGUMENT_KEYS and not told and held is None:
                if name is None:
                    held = []
                    yield from self._arguments(after, held.append)
                else:
                    yield from self._arguments(after, self._write, CallStart(name))
                    self.emit(CallEnd())
                    told = True
            elif known_only and key not in ("type", "id"):
                raise MalformedError
            else:
                yield from json_stream.value(reader, lambda text: None)
            after = yield from reader.skip_space()
            if after == "}" and name is not None and not told and not known_only:
                self._tell(name, "{}")
                told = True
            if after in ("}", ","):
                reader.position += 1
            if after != "," or told:
                break
        if not told:
            raise MalformedError
        if after == ",":
            yield from self._rest_of_object()

    def _rest_of_object(self) -> Steps:
        """Members after the call was told; they say nothing, and cannot undo it."""
        try:
            while True:
                yield from self.reader.skip_space()
                yield from self._string()
                yield from self.reader.skip_space()
                yield from self._expect(":")
                yield from self.reader.skip_space()
                yield from json_stream.value(self.reader, lambda text: None)
                after = yield from self.reader.skip_space()
                if after in ("}", ","):
                    self.reader.position += 1
                if after != ",":
                    return
        except MalformedError:
            return

    def _arguments(self, first: str, write: Callable[[str], None], start: CallStart | None = None) -> Steps:
        """An object; or, as some models write it, a string that holds one; or null for none.

        first: the next character. start: what to tell when it is known that there are arguments.
        """

        def begin() -> None:
            if start is not None:
                self.emit(start)

        if first == "{":
            begin()
            yield from json_stream.value(self.reader, write)
        elif first == '"':
            text = yield from self._string()
            if not _is_object(text):
                raise MalformedError
            begin()
            write(text)
        elif (yield from self.reader.take("null")):
            begin()
            write("{}")
        else:
            raise MalformedError

    def _tell(self, name: str, arguments: str) -> None:
        self.emit(CallStart(name))
        self._write(arguments)
        self.emit(CallEnd())

    def _write(self, text: str) -> None:
        self.emit(CallArguments(text))

    def _string(self) -> Generator[None, None, str]:
        parts: list[str] = []
        yield from json_stream.string(self.reader, parts.append)
        text: str = json.loads("".join(parts))
        return text

    def _expect(self, character: str) -> Steps:
        if (yield from self.reader.peek()) != character:
            raise MalformedError
        self.reader.position += 1

    def call_array(self, *, known_only: bool = False) -> Steps:
        """`[{...}, {...}]`: call objects, told one by one."""
        yield from self._expect("[")
        while True:
            yield from self.reader.skip_space()
            yield from self.call_object(known_only=known_only)
            self.reader.keep = self.reader.position
            if (yield from self.reader.skip_space()) != ",":
                break
            self.reader.position += 1
        yield from self._expect("]")

    def call_name(self) -> Generator[None, None, str]:
        """A function's name, up to the first character that cannot be of it."""
        reader = self.reader
        while True:
            match = _NAME.match(reader.text, reader.position)
            if match is None:
                if not (yield from reader.fill()):
                    raise MalformedError
                if _NAME.match(reader.text, reader.position) is None:
                    raise MalformedError
            elif match.end() < len(reader.text) or not (yield from reader.more()):
                reader.position = match.end()
                return match[0]


def _is_object(text: str) -> bool:
    """Whether `text` is JSON of an object, and can be sent: half of a surrogate pair cannot."""
    try:
        return isinstance(json.loads(text.encode()), dict)
    except (ValueError, RecursionError):
        return False
