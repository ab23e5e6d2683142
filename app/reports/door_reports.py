"""Tells the engine replicas what waits in an ingress replica, for the autoscaler.

Serve's own counts stop at its handles, and what waits in our queue has not reached one.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from app.admission import Admission
from app.reports.signals import DOOR_REPORT_S, DoorReport

logger = logging.getLogger("ray.serve")

INTERVAL_S = DOOR_REPORT_S / 5


async def report_queue(
    name: str,
    admission: Admission,
    send: Callable[[DoorReport], Awaitable[None]],
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Send reports while anything waits, and one more when that ends. Never returns; a report that cannot be sent is
    dropped, since the next one says more."""
    told = False
    while True:
        if admission.waiting or told:
            told = admission.waiting > 0
            report = DoorReport(name, admission.waiting, admission.waiting_tokens, admission.longest_wait_s())
            try:
                await send(report)
            except Exception as error:  # no replica is there, or they are just going
                logger.debug("A report of the queue was not sent: %r", error)
        await sleep(INTERVAL_S)
