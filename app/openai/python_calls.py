"""The arguments of a call written as in Python: `(city="Paris", days=[1, 2])`."""

import ast
import json
import warnings
from collections.abc import Generator
from typing import Any

from app.openai.parsing import MalformedError, Reader

_JSON_NAMES = {"true": True, "false": False, "null": None}
_MAX_LENGTH = 100_000


def read_arguments(reader: Reader) -> Generator[None, None, str]:
    """Read from `(` to its `)`, as JSON. Only literals by keyword are taken: nothing is ever run.

    Raises `MalformedError`.
    """
    if (yield from reader.peek()) != "(":
        raise MalformedError
    parts: list[str] = []
    quote, depth = "", 0
    while character := (yield from reader.peek()):
        reader.position += 1
        parts.append(character)
        if quote:
            if character == "\\":
                parts.append((yield from reader.peek()))
                reader.position += len(parts[-1])
            elif character == quote:
                quote = ""
        elif character in "\"'":
            quote = character
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
            if not depth:
                return _as_json("".join(parts))
        if len(parts) > _MAX_LENGTH:
            raise MalformedError
    raise MalformedError


def _as_json(arguments: str) -> str:
    try:
        with warnings.catch_warnings(action="ignore"):  # of escapes that Python does not know
            call = ast.parse("f" + arguments, mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise MalformedError
        given = {_keyword(keyword): _literal(keyword.value) for keyword in call.keywords}
        text = json.dumps(given, ensure_ascii=False, allow_nan=False)
        text.encode()  # half of a surrogate pair could not be sent
        return text
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise MalformedError from None


def _keyword(keyword: ast.keyword) -> str:
    if keyword.arg is None:  # **mapping
        raise MalformedError
    return keyword.arg


def _literal(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.Name(id=name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _literal(value) for key, value in zip(keys, values, strict=True)}
    raise MalformedError


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise MalformedError
