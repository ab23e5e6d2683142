"""What /metrics says: the whole application's state, gathered from all its replicas when somebody asks."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextvars import Context

from app import metrics
from app.openai.errors import EngineFault
from app.request_stats import IngressStats
from engine.outputs import EngineStats

KEEP_S = 1.0
"""Seconds for which an answer is given again, so that many who ask cost the replicas no more than one."""


class Scrape:
    """engines, ingresses: ask all replicas of a kind; `EngineFault` stands for none that answers."""

    def __init__(
        self,
        model: str,
        engines: Callable[[], Awaitable[list[EngineStats]]],
        ingresses: Callable[[], Awaitable[list[IngressStats]]],
    ) -> None:
        self._model = model
        self._engines = engines
        self.ingresses = ingresses
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
        engines, ingresses = await asyncio.gather(self._all_engines(), self.ingresses())
        return metrics.render(self._model, engines, ingresses)

    async def _all_engines(self) -> list[EngineStats]:
        """None when none answers: that is a state too, as with a pool that is scaled to zero."""
        try:
            return await self._engines()
        except EngineFault:
            return []
