"""One JSON value read from text that comes in pieces (RFC 8259), told on as it is read."""

import re
from collections.abc import Callable, Generator

from app.openai.parsing import MalformedError, Reader, Steps

MAX_DEPTH = 64
"""Arrays and objects within one another; client libraries stop somewhere beyond it."""

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_WORD = re.compile(r"[-+.0-9A-Za-z]+")
_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_ESCAPES = frozenset('"\\/bfnrtu')
_HEX = frozenset("0123456789abcdefABCDEF")
_MAX_WORD = 512

Write = Callable[[str], None]


def value(reader: Reader, write: Write, depth: int = 0) -> Steps:
    """Read a value and `write` its text piece by piece, as soon as each piece is known to be right.

    Line breaks and other control characters within a string, which models write and JSON forbids, are written escaped.
    Raises `MalformedError` at the first character that no value could go on with, which is not taken.
    """
    match (yield from _next(reader, write)):
        case '"':
            yield from string(reader, write)
        case "{" if depth < MAX_DEPTH:
            yield from _members(reader, write, "}", depth)
        case "[" if depth < MAX_DEPTH:
            yield from _members(reader, write, "]", depth)
        case _:
            yield from _scalar(reader, write)


def string(reader: Reader, write: Write) -> Steps:
    """Read a string, with its quotes."""
    if (yield from reader.peek()) != '"':
        raise MalformedError
    reader.position += 1
    write('"')
    while True:
        character = yield from reader.peek()
        if character == '"':
            reader.position += 1
            write('"')
            return
        if character == "\\":
            yield from _escape(reader, write)
        elif character == "":
            raise MalformedError
        elif character < " ":
            reader.position += 1
            write({"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(character) or f"\\u{ord(character):04x}")
        else:
            plain = _PLAIN.match(reader.text, reader.position)
            assert plain is not None
            reader.position = plain.end()
            write(plain[0])


def _escape(reader: Reader, write: Write) -> Steps:
    """Written when whole, so that what has been written never ends within one."""
    yield from _wait_for(reader, 2)
    kind = reader.ahead(2)[1]
    if kind not in _ESCAPES:
        raise MalformedError
    length = 6 if kind == "u" else 2
    yield from _wait_for(reader, length)
    escape = reader.ahead(length)
    if kind == "u" and not _HEX.issuperset(escape[2:]):
        raise MalformedError
    reader.position += length
    write(escape)


def _wait_for(reader: Reader, count: int) -> Steps:
    while len(reader.ahead(count)) < count:
        if not (yield from reader.more()):
            raise MalformedError


def _members(reader: Reader, write: Write, close: str, depth: int) -> Steps:
    """The inside of an object or array, from its opening to its closing bracket."""
    write(reader.text[reader.position])
    reader.position += 1
    if (yield from _next(reader, write)) == close:
        reader.position += 1
        write(close)
        return
    while True:
        if close == "}":
            yield from _next(reader, write)
            yield from string(reader, write)
            if (yield from _next(reader, write)) != ":":
                raise MalformedError
            reader.position += 1
            write(":")
        yield from value(reader, write, depth + 1)
        after = yield from _next(reader, write)
        if after not in (",", close):
            raise MalformedError
        reader.position += 1
        write(after)
        if after == close:
            return


def _next(reader: Reader, write: Write) -> Generator[None, None, str]:
    """The next character that is no white space, not taken; the white space before it is written."""
    while (character := (yield from reader.peek())) and character in " \t\r\n":
        reader.position += 1
        write(character)
    return character


def _scalar(reader: Reader, write: Write) -> Steps:
    """A number, true, false or null: written when its end is seen."""
    text = ""
    while (yield from reader.fill()):
        word = _WORD.match(reader.text, reader.position)
        text = word[0] if word else ""
        if len(text) > _MAX_WORD:
            raise MalformedError
        if word is None or word.end() < len(reader.text) or not (yield from reader.more()):
            break
    if not _SCALAR.fullmatch(text):
        raise MalformedError
    reader.position += len(text)
    write(text)
