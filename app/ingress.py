"""The ingress deployment: HTTP and text on this side, token ids on the engine's."""

import math
from typing import Any

from starlette.applications import Starlette

from app.admission import Admission
from app.chat import ChatSide
from app.chat_template import chat_templates
from app.doors import Doors, read_keys
from app.engine_client import EngineClient, ServeEngineClient
from app.routes import create_app
from app.service import Service
from app.settings import AppSettings
from engine.hub import resolve_model
from engine.tokenizer import load_tokenizer

OVERCOMMIT = 1.25
"""Requests sent to the engine over those it runs at once: enough that one that ends is followed at once, and few
enough that the rest can still go to a replica that starts now."""


async def create_service(settings: AppSettings, client: EngineClient) -> Service:
    """Load the tokenizer and ask the engine what it can do; waits until the engine is up."""
    config = settings.engine_config()
    tokenizer = load_tokenizer(resolve_model(config.model), config.trust_remote_code)
    _ = tokenizer.token_bytes  # made on first use, which no request should wait for
    limits = await client.limits()
    capacity = math.ceil(OVERCOMMIT * limits.max_num_seqs) * settings.num_replicas
    templates = chat_templates(tokenizer, settings.chat_template)
    return Service(
        settings.public_model_name,
        tokenizer,
        client,
        limits,
        Admission(capacity, settings.max_queue_size),
        ChatSide(templates, settings.tool_call_parser, settings.reasoning_parser),
    )


def doors(settings: AppSettings) -> Doors:
    """Raises `ConfigError` for a file of keys that cannot be read."""
    return Doors(
        keys=read_keys([key.get_secret_value() for key in settings.api_keys], settings.api_keys_file),
        max_requests_per_key=settings.max_requests_per_key,
        allow_origins=settings.cors_allow_origins,
    )


class IngressDeployment:
    """What Serve runs: a shell, since a class under a deployment travels by value."""

    def __init__(self, settings: AppSettings, engine: Any) -> None:
        self._settings = settings
        self._engine = engine

    async def __serve_build_asgi_app__(self) -> Starlette:
        service = await create_service(self._settings, ServeEngineClient(self._engine))
        return create_app(service, self._settings.stream_commit_s, doors(self._settings))
