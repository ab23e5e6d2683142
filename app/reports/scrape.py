"""What /metrics says: the whole application's state, gathered from all its replicas when somebody asks."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextvars import Context

from app import metrics
from app.openai.errors import EngineFault
from app.reports.request_stats import IngressStats
from engine.outputs import EngineStats

ModelStats = Mapping[str, IngressStats]
"""What one ingress has counted, by model."""

KEEP_S = 1.0
"""Seconds for which an answer is given again, so that many who ask cost the replicas no more than one."""


class Scrape:
    """engines: of each model, asks all replicas; `EngineFault` stands for none that answers.
    here: what this ingress has counted, by model. ingresses: asks all of them; by default this is the only one."""

    def __init__(
        self,
        engines: Mapping[str, Callable[[], Awaitable[list[EngineStats]]]],
        here: Callable[[], ModelStats],
        ingresses: Callable[[], Awaitable[list[ModelStats]]] | None = None,
    ) -> None:
        self._engines = engines
        self._here = here
        self._ingresses = ingresses
        self._answer: asyncio.Task[str] | None = None
        self._asked_at = 0.0

    async def text(self) -> str:
        """In Prometheus' format."""
        now = time.monotonic()
        if self._answer is None or (self._answer.done() and now - self._asked_at >= KEEP_S):
            self._asked_at = now
            # Not within the request that asks first: if its client leaves, the others still want the answer.
            self._answer = asyncio.get_running_loop().create_task(self._gather(), context=Context())
        return await asyncio.shield(self._answer)

    async def _gather(self) -> str:
        ingresses, engines = await asyncio.gather(
            self._all_ingresses(), asyncio.gather(*map(_all_of, self._engines.values()))
        )
        return metrics.render(
            {
                model: (replicas, [counted[model] for counted in ingresses if model in counted])
                for model, replicas in zip(self._engines, engines, strict=True)
            }
        )

    async def _all_ingresses(self) -> list[ModelStats]:
        found = [] if self._ingresses is None else await self._ingresses()
        return found or [self._here()]


async def _all_of(ask: Callable[[], Awaitable[list[EngineStats]]]) -> list[EngineStats]:
    """None when none answers: that is a state too, as with a pool that is scaled to zero."""
    try:
        return await ask()
    except EngineFault:
        return []
