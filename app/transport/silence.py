"""Engine replicas that are there and say nothing, as one whose process is stopped or whose machine is out of reach.

Serve would wait for them through three health checks. An ingress that has heard nothing for a while asks all replicas
what they hold. Those that do not answer, twice, while others do, lose their requests, which go on elsewhere, and get
none until they answer. One that is only busy, with a long step or a long compilation, does answer. All are asked now
and then besides, in case the word of a request's end has been lost.

Where there is no replica, a request waits for one to start, unless there will be none: Serve then refuses new calls,
and forgets those that wait already.
"""

import asyncio
import time
from typing import Any

from ray.serve.exceptions import DeploymentUnavailableError

from app.engine_client import Holding
from app.reports.pool import Pool
from app.transport.broadcast import ask_all
from app.transport.carriers import Carriers

SILENCE_S = 5.0
"""Seconds without a word on a request that is under way, after which all are asked."""

ANSWER_S = 5.0
"""And that they have to answer."""

LOOK_S = 1.0

CHECK_S = 10.0
"""Seconds between two looks at whether what is under way is still held."""

REFUSAL_S = 0.5
"""In which a call is refused that Serve will not take; it asks nobody for that."""


async def watch(handle: Any, pool: Pool, carriers: Carriers) -> None:
    """Keep `pool.silent` true, and no request waiting for a word that does not come. Never returns.

    handle, pool, carriers: of one engine deployment.
    """
    suspects: frozenset[str] = frozenset()
    unsure, checked_at = False, time.monotonic()
    while True:
        await asyncio.sleep(LOOK_S)
        if carriers.has_unplaced and not pool.replicas and await is_gone(handle):
            carriers.give_up()
        asked, waits = pool.replicas, carriers.waits_s()
        due = waits > 0 and time.monotonic() - checked_at > CHECK_S
        if not (pool.silent or suspects or unsure or due or waits > SILENCE_S):
            continue
        placed = carriers.placed()
        try:
            answers = await ask_all(handle, "holding", timeout_s=ANSWER_S)
        except Exception:  # no replica is there any more
            suspects = frozenset()
            continue
        holdings = [answer for answer in answers if isinstance(answer, Holding)]
        unsure, checked_at = carriers.check(holdings, placed), time.monotonic()
        answered = frozenset(holding.replica for holding in holdings if holding.replica in asked)
        suspects, before = asked - answered if answered else frozenset(), suspects
        known = pool.silent
        pool.set_silent(suspects & (before | known))
        if new := pool.silent - known:
            carriers.lose(new)


async def is_gone(handle: Any) -> bool:
    """Whether a deployment without replicas will have none: it was deleted, or could not start. One that sleeps, or
    whose only replica is being replaced, holds calls back until there is a replica."""
    try:
        await asyncio.wait_for(handle.limits.remote(), REFUSAL_S)
    except DeploymentUnavailableError:
        return True
    except Exception:  # it waits, or the replica that it reached is gone already
        return False
    return False
