"""What is told of settings that are wrong, in a line that names them."""

import difflib
from collections.abc import Callable, Collection, Sequence
from typing import Any

from pydantic import ValidationError


def unknown_settings(names: Sequence[str], shown: Callable[[str], str], known: Collection[str]) -> str:
    """Which are meant, or, where none is like them, which there are.

    shown: a setting's name as the person wrote it.
    """
    likely = {name: difflib.get_close_matches(name.lower(), known, n=1) for name in names}
    found = [f"{shown(name)} (did you mean {near[0]}?)" if near else shown(name) for name, near in likely.items()]
    text = f"unknown setting {', '.join(found)}"
    return text if all(likely.values()) else f"{text}; known are {', '.join(sorted(known))}"


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
