"""What is told of settings whose values are wrong, in a line that names them."""

from collections.abc import Callable
from typing import Any

from pydantic import ValidationError


def wrong_values(error: ValidationError, shown: Callable[[str], str]) -> str:
    lines = [
        f"{shown(str(e['loc'][0]))}: {_message(e)}{_given(e)}" if e["loc"] else _message(e)
        for e in error.errors(include_url=False)
    ]
    return "; ".join(dict.fromkeys(lines))


def _message(error: Any) -> str:
    """Pydantic's, to be read after a setting's name; the values that it lists are as they must be written."""
    text: str = error["msg"].removeprefix("Value error, ")
    return text[0].lower() + text[1:]


def _given(error: Any) -> str:
    """What was given, unless it is a secret."""
    return "" if error["loc"][0] == "api_keys" else f", got {error['input']!r}"
