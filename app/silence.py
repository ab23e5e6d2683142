"""Engine replicas that are there and say nothing, as one whose process is stopped or whose machine is out of reach.

Serve would wait for them through three health checks. An ingress that has heard nothing for a while asks all replicas
for their names. Those that do not answer, twice, while others do, lose their requests, which go on elsewhere, and get
none until they answer. One that is only busy, with a long step or a long compilation, does answer.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from app.broadcast import ask_all
from app.pool import Pool

SILENCE_S = 5.0
"""Seconds without a word on a request that is under way, after which all are asked."""

ANSWER_S = 5.0
"""And that they have to answer."""

LOOK_S = 1.0


async def watch(handle: Any, pool: Pool, waits_s: Callable[[], float], lose: Callable[[frozenset[str]], None]) -> None:
    """Keep `pool.silent` true. Never returns.

    waits_s: how long the request that has heard least has heard nothing. lose: takes the requests of replicas away,
    and those that may be on their way there.
    """
    suspects: frozenset[str] = frozenset()
    while True:
        await asyncio.sleep(LOOK_S)
        asked = pool.replicas
        if len(asked) < 2 or not (pool.silent or suspects or waits_s() > SILENCE_S):
            suspects = frozenset()
            continue
        try:
            answered = frozenset(name for name in await ask_all(handle, "name", timeout_s=ANSWER_S) if name in asked)
        except Exception:  # no replica is there any more
            continue
        suspects, before = asked - answered if answered else frozenset(), suspects
        known = pool.silent
        pool.set_silent(suspects & (before | known))
        if new := pool.silent - known:
            lose(new)
