"""The ingress deployment: HTTP and text on this side, token ids on the engine's."""

import asyncio
import gc
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from starlette.applications import Starlette

from app.admission import Admission, Budget
from app.engine_client import EngineClient, EngineLimits
from app.failover import FailoverClient
from app.http.doors import Doors, read_keys
from app.http.routes import create_app
from app.prompts.chat import ChatSide
from app.prompts.chat_template import chat_templates
from app.reports.door_reports import INTERVAL_S, report_queue
from app.reports.pool import Pool, pool_of
from app.reports.scrape import ModelStats
from app.reports.signals import DoorReport
from app.service.adapters import AdapterChange, Adapters
from app.service.catalog import Catalog
from app.service.peers import Peers, keep_learning
from app.service.service import Service
from app.settings import AppSettings, with_live
from app.transport.broadcast import ask_all
from app.transport.serve_client import ServeEngineClient
from app.transport.silence import watch
from engine.errors import ConfigError
from engine.hf.generation_config import default_sampling
from engine.hub import resolve_model
from engine.text.tokenizer import load_tokenizer

logger = logging.getLogger("ray.serve")

OVERCOMMIT = 1.25
"""Requests sent to the engine over those it runs at once: enough that one that ends is followed at once, and few
enough that the rest can still go to a replica that starts now."""

SPARE = 0.25
"""Of the requests that the engine runs at once: what it is sent beyond those, of tenants that have less than others."""


YOUNG_OBJECTS = 10_000
"""Objects more than at the last garbage collection that bring the next one about. Python's own 700 are a few requests
that begin, and each collection held up all streams for 1 to 20 ms, though nearly all goes by its reference counts."""


async def create_service(settings: AppSettings, client: EngineClient, pool: Pool) -> Service:
    """Load the tokenizer and ask the engine what it can do; waits until the engine is up."""
    config = settings.engine_config()
    path = resolve_model(config.model)
    tokenizer = load_tokenizer(path, config.trust_remote_code)
    _ = tokenizer.token_bytes  # made on first use, which no request should wait for
    limits = await client.limits()
    templates = chat_templates(tokenizer, settings.chat_template)
    adapters = Adapters(settings.public_model_name, client, settings.allow_runtime_lora_updating)
    await adapters.load_all(settings.lora_modules)
    return Service(
        settings.public_model_name,
        tokenizer,
        client,
        limits,
        admission(settings, limits),
        ChatSide(templates, settings.tool_call_parser, settings.reasoning_parser),
        scales_to_zero=settings.max_replicas is not None and settings.min_replicas == 0,
        default_sampling=default_sampling(path, config.generation_config),
        pool=pool,
        adapters=adapters,
    )


def admission(settings: AppSettings, limits: EngineLimits) -> Admission:
    budget = Budget(
        requests=math.ceil(OVERCOMMIT * limits.max_num_seqs),
        tokens=OVERCOMMIT * limits.kv_tokens,
        batch_requests=limits.max_num_seqs,
        spare=math.ceil(SPARE * limits.max_num_seqs),
    )
    replicas = settings.num_replicas if settings.max_replicas is None else max(1, settings.min_replicas)
    return Admission(budget, settings.max_queue_size, replicas)


def doors(settings: AppSettings) -> Doors:
    """Raises `ConfigError` for a file of keys that cannot be read."""
    return Doors(
        keys=read_keys([key.get_secret_value() for key in settings.api_keys], settings.api_keys_file),
        max_requests_per_key=settings.max_requests_per_key,
        allow_origins=settings.cors_allow_origins,
    )


def change_live(settings: AppSettings, changes: Mapping[str, Any], services: Sequence[Service], doors: Doors) -> None:
    """Go by `changes` of the settings, and by the keys that are in their file now. Raises `ConfigError`, and then
    nothing has changed."""
    live = with_live(settings, changes)
    keys = read_keys([key.get_secret_value() for key in live.api_keys], live.api_keys_file)
    if bool(keys) is not doors.keys.any:
        raise ConfigError("user_config: with keys or without is decided at the start")
    doors.keys.change(keys, live.max_requests_per_key)
    for each, service in zip(live.each, services, strict=True):
        service.admission.max_waiting = each.max_queue_size
        if isinstance(service.client, FailoverClient):
            service.client.max_tries = each.max_resubmissions


class IngressDeployment:
    """What Serve runs: a shell, since a class under a deployment travels by value."""

    def __init__(self, settings: AppSettings, *engines: Any) -> None:
        """engines: handles, one for each of `settings.each`."""
        self._settings = settings
        self._engines = engines
        self._runs = False
        self._tasks: list[asyncio.Task[None]] = []

    async def __serve_build_asgi_app__(self) -> Starlette:
        settings = self._settings
        services = await asyncio.gather(*map(self._serve, settings.each, self._engines))
        self._services, self._doors = services, doors(settings)
        peers = Peers()
        self._catalog = Catalog(services, peers.stats, peers.tell)
        if any(each.allow_runtime_lora_updating for each in settings.each):
            self._catalog.learn(await peers.adapters())
            self._tasks.append(asyncio.create_task(keep_learning(self._catalog, peers.adapters)))
        gc.freeze()  # what has been loaded stays: looking through it again and again would hold up every stream
        gc.set_threshold(YOUNG_OBJECTS)
        return create_app(self._catalog, settings.stream_commit_s, self._doors)

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Called by Serve when the deployment's `user_config` has changed, and at the start if there is one.

        A wrong one is refused at the start (`ConfigError`); later it is logged and changes nothing: Serve would end the
        replica, with all its streams.
        """
        try:
            change_live(self._settings, user_config, self._services, self._doors)
        except ConfigError as error:
            if not self._runs:
                raise
            logger.error("The settings stay as they were: %s", error)
        self._runs = True

    async def stats(self) -> ModelStats:
        """For the other ingresses."""
        return self._catalog.stats()

    async def change_adapters(self, changes: list[AdapterChange]) -> None:
        """From another ingress, or this one, which knows it already."""
        self._catalog.learn(changes)

    async def adapters(self) -> list[AdapterChange]:
        """For an ingress that starts."""
        return self._catalog.adapters()

    async def _serve(self, settings: AppSettings, engine: Any) -> Service:
        """One model. Its queue goes by the replicas there are, and its autoscaler by the queue."""
        transport, pool = ServeEngineClient(engine), pool_of(engine.deployment_name)
        client = FailoverClient(transport, settings.max_resubmissions)
        service = await create_service(settings, client, pool)
        loop = asyncio.get_running_loop()

        def resize(replicas: int) -> None:  # called in Serve's routing thread
            loop.call_soon_threadsafe(service.admission.resize, replicas)

        pool.follow(resize)

        async def send(report: DoorReport) -> None:
            await ask_all(engine, "note_door", report, timeout_s=INTERVAL_S)  # a replica that hangs holds up no report

        self._tasks.append(loop.create_task(report_queue(uuid4().hex, service.admission, send)))
        self._tasks.append(loop.create_task(watch(engine, pool, transport.carriers)))
        return service
