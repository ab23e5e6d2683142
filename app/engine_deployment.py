"""The engine deployment: what Serve starts, asks and replaces. `EngineReplica`, which knows no Ray, does the work."""

import asyncio
import gc
import logging
import os
import time
from collections.abc import AsyncGenerator, Callable

from app.engine_client import EngineLimits, Holding, Message, Refusal, Submission
from app.replica import EngineReplica
from app.reports.signals import DoorReport, Signals
from app.reports.startup import Startup, StartupTimes
from engine.config import EngineConfig
from engine.errors import EngineDeadError
from engine.lora.request import LoRARequest
from engine.outputs import EngineStats
from engine.runner import Runner

LAST_WORDS_S = 0.05
"""Seconds in which a replica whose engine has failed still tells how its requests ended."""

SURE_S = 1.0
"""Seconds that an engine must be found standing still before its replica leaves: a process that was stopped itself
finds that at first, when it goes on."""

logger = logging.getLogger("ray.serve")


def start_replica(config: EngineConfig, on_failure: Callable[[], None], name: str) -> EngineReplica:
    """Load the model and start stepping. Blocks for as long as loading takes; call it in the event loop's thread.

    on_failure, name: as in `EngineReplica`; the first is called for a lost shard, too.
    """
    from engine.engine import Engine
    from engine.step_loop import StepLoop

    event_loop = asyncio.get_running_loop()

    def start_shards(config: EngineConfig) -> Runner:
        from app.shards import lead_shards

        return lead_shards(config, lambda: event_loop.call_soon_threadsafe(on_failure))

    engine = Engine.from_config(config, start_shards)
    info = engine.info
    logger.info(
        "Engine ready: %d KV blocks of %d tokens, requests of up to %d tokens, %d at once.",
        info.num_blocks,
        info.block_size,
        info.max_total_tokens,
        info.max_num_seqs,
    )
    return EngineReplica(lambda on_output: StepLoop(engine, on_output), on_failure, name)


def leave_soon() -> None:
    """End this process, whose engine has failed or stands still, when its last messages are out.

    Serve replaces a replica that is gone at once, and sends it nothing meanwhile; one that is unhealthy it would keep
    asking for seconds, and answer requests with its errors.
    """
    logger.error("the engine has failed: this replica ends, to be replaced")
    asyncio.get_running_loop().call_later(LAST_WORDS_S, os._exit, 1)


def show_engine_log() -> None:
    """Let the engine's own log lines reach Serve's log; a library, it sets up none."""
    engine_log = logging.getLogger("engine")
    engine_log.handlers = list(logger.handlers)
    engine_log.setLevel(logger.level)
    engine_log.propagate = False


class EngineDeployment:
    """What Serve runs: a shell, since a class under a deployment travels by value."""

    _ill_since = 0.0

    def __init__(self, config: EngineConfig) -> None:
        from ray import serve

        startup = Startup()
        show_engine_log()
        name = serve.get_replica_context().replica_id.unique_id  # as the routers call it
        self._replica = start_replica(config, leave_soon, name)
        self._startup_times = startup.done()
        logger.info("Replica up: %s.", self._startup_times)
        self._signals = Signals(self._replica.limits().max_num_seqs)
        gc.freeze()  # what has been loaded stays: looking through it again and again would hold up the steps

    async def submit(self, submission: Submission, ingress: str) -> AsyncGenerator[Message, None]:
        return self._replica.submit(submission, ingress)

    async def load_adapter(self, request: LoRARequest) -> str | Refusal:
        return await self._replica.load_adapter(request)

    async def abort(self, request_id: str) -> None:
        self._replica.abort(request_id)

    async def limits(self) -> EngineLimits:
        return self._replica.limits()

    async def stats(self) -> EngineStats:
        return self._replica.stats()

    async def holding(self) -> Holding:
        """Asked by an ingress that has heard nothing for a while."""
        return self._replica.holding()

    async def startup_times(self) -> StartupTimes:
        return self._startup_times

    async def note_door(self, report: DoorReport) -> None:
        """Take down what an ingress replica holds back, for the autoscaler."""
        self._signals.note_door(report)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Asked by Serve, for `app.autoscaling`."""
        return self._signals.autoscaling(self._replica.stats())

    async def record_routing_stats(self) -> dict[str, float]:
        """Asked by Serve, for `app.router`."""
        return self._signals.routing(self._replica.stats())

    async def check_health(self) -> bool:
        """Asked by Serve and by the ingress; async, since Serve would run a plain one in a thread that sees nothing."""
        try:
            self._replica.check_health()
        except EngineDeadError:
            now = time.monotonic()
            self._ill_since = self._ill_since or now
            if now - self._ill_since >= SURE_S:
                leave_soon()
            raise
        self._ill_since = 0.0
        return True

    def __del__(self) -> None:
        if hasattr(self, "_replica"):
            self._replica.close()
