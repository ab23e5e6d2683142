"""Calls of every replica of a deployment at once, past the queues of requests."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

CONTROL_TIMEOUT_S = 5.0
"""Seconds that statistics and health may take before a replica counts as unreachable."""


async def answers_of(
    handle: Any, method: str, *args: Any, timeout_s: float = CONTROL_TIMEOUT_S
) -> AsyncGenerator[Any, None]:
    """Answers as they come, and exceptions in the place of those that fail; a replica that says nothing holds up and
    hides no other's answer.

    Raises what Serve raises when there is no replica.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + timeout_s
    # `results_async` of Serve's broadcasts gives all answers or, if one of them is late, none.
    calls = await asyncio.wait_for(handle.broadcast(method, *args)._fetch_replica_results_async(), timeout_s)
    pending = {asyncio.ensure_future(call.get_async()) for call in calls}
    try:
        while pending:
            done, pending = await asyncio.wait(
                pending, timeout=max(0.0, end - loop.time()), return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                return
            for task in done:
                if not task.cancelled():
                    error = task.exception()
                    yield task.result() if error is None else error
    finally:
        for task in pending:
            task.cancel()


async def ask_all(handle: Any, method: str, *args: Any, timeout_s: float = CONTROL_TIMEOUT_S) -> list[Any]:
    """All answers that came in time; see `answers_of`."""
    async with aclosing(answers_of(handle, method, *args, timeout_s=timeout_s)) as answers:
        return [answer async for answer in answers]
