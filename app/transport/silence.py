"""Engine replicas that are there and say nothing, as one whose process is stopped or whose machine is out of reach.

Serve would wait for them through three health checks. An ingress that has heard nothing for a while asks all replicas
what they hold. Those that do not answer, twice, while others do, lose their requests, which go on elsewhere, and get
none until they answer. One that is only busy, with a long step or a long compilation, does answer. All are asked now
and then besides, in case the word of a request's end has been lost.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any

from app.engine_client import Holding
from app.reports.pool import Pool
from app.transport.broadcast import ask_all

SILENCE_S = 5.0
"""Seconds without a word on a request that is under way, after which all are asked."""

ANSWER_S = 5.0
"""And that they have to answer."""

LOOK_S = 1.0

CHECK_S = 10.0
"""Seconds between two looks at whether what is under way is still held."""


async def watch(
    handle: Any,
    pool: Pool,
    waits_s: Callable[[], float],
    lose: Callable[[frozenset[str]], None],
    check: Callable[[Iterable[Holding]], bool],
) -> None:
    """Keep `pool.silent` true, and no request waiting for a word that does not come. Never returns.

    waits_s: how long the request that has heard least has heard nothing; 0 if there is none. lose: takes the requests
    of replicas away, and those that may be on their way there. check: is told what replicas hold, and says whether it
    must be told again soon.
    """
    suspects: frozenset[str] = frozenset()
    unsure, checked_at = False, time.monotonic()
    while True:
        await asyncio.sleep(LOOK_S)
        asked, waits = pool.replicas, waits_s()
        due = waits > 0 and time.monotonic() - checked_at > CHECK_S
        if not (pool.silent or suspects or unsure or due or waits > SILENCE_S):
            continue
        try:
            answers = await ask_all(handle, "holding", timeout_s=ANSWER_S)
        except Exception:  # no replica is there any more
            suspects = frozenset()
            continue
        holdings = [answer for answer in answers if isinstance(answer, Holding)]
        unsure, checked_at = check(holdings), time.monotonic()
        answered = frozenset(holding.replica for holding in holdings if holding.replica in asked)
        suspects, before = asked - answered if answered else frozenset(), suspects
        known = pool.silent
        pool.set_silent(suspects & (before | known))
        if new := pool.silent - known:
            lose(new)
