"""What takes long goes to a thread: the event loop has all streams to serve."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

INLINE_SIZE = 8_192
"""Characters that are tokenised in the event loop, in about 7 ms; more of them go to a thread."""


async def off_loop(function: Callable[..., T], size: int, *args: Any) -> T:
    """`function(*args)`, in a thread if `size`, in characters, bytes or tokens, says that it takes long."""
    return function(*args) if size <= INLINE_SIZE else await asyncio.to_thread(function, *args)
