"""The other replicas of the ingress deployment: what they have counted, and what they know of adapters."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from ray import serve

from app.reports.scrape import ModelStats
from app.service.adapters import AdapterChange
from app.service.catalog import Catalog
from app.transport.broadcast import ask_all

_TRIES, _PAUSE_S = 5, 0.2
"""A handle that was made just now may not have heard yet which replicas there are."""

ASK_AGAIN_S = 10.0
"""Until an ingress knows of every adapter's change: who was not told, as it was just starting or did not answer, asks
so often."""


class Peers:
    """All replicas of the ingress deployment, this one among them."""

    def __init__(self) -> None:
        here = serve.get_replica_context()
        self._handle = serve.get_deployment_handle(here.deployment, here.app_name)

    async def stats(self) -> list[ModelStats]:
        """Of those that answer."""
        try:
            answers = await ask_all(self._handle, "stats")
        except Exception:
            return []
        return [answer for answer in answers if isinstance(answer, dict)]

    async def tell(self, change: AdapterChange) -> None:
        """Of an adapter that was loaded or unloaded here."""
        with suppress(Exception):  # none is there yet that could be told
            await ask_all(self._handle, "change_adapters", [change])

    async def adapters(self) -> list[AdapterChange]:
        """What the others know that were loaded and unloaded; none if nobody answers, as when all begin."""
        for _ in range(_TRIES):
            with suppress(Exception):
                answers = await ask_all(self._handle, "adapters")
                if known := [answer for answer in answers if isinstance(answer, list)]:
                    return [adapter for adapters in known for adapter in adapters]
            await asyncio.sleep(_PAUSE_S)
        return []


async def keep_learning(
    catalog: Catalog,
    ask: Callable[[], Awaitable[list[AdapterChange]]],
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Ask the other ingress replicas for what this one has missed of their adapters. Never returns."""
    while True:
        await sleep(ASK_AGAIN_S)
        catalog.learn(await ask())
