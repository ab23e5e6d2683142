"""What is told of settings that there are not, in a line that names them."""

import difflib
from collections.abc import Callable, Collection, Sequence


def unknown_settings(names: Sequence[str], known: Collection[str], shown: Callable[[str], str] = str) -> str:
    """Which are meant, or, where none is like them, which there are.

    shown: a setting's name as the person wrote it: the name itself, or a variable that ends with it in capitals.
    """

    def meant(name: str, near: str) -> str:
        written = shown(name)
        return near if written == name else written.removesuffix(name.upper()) + near.upper()

    likely = {name: difflib.get_close_matches(name.lower(), known, n=1) for name in names}
    found = [
        f"{shown(name)} (did you mean {meant(name, near[0])}?)" if near else shown(name)
        for name, near in likely.items()
    ]
    text = f"unknown setting {', '.join(found)}"
    return text if all(likely.values()) else f"{text}; known are {', '.join(sorted(known))}"
