"""Settings to a Serve application: which deployments, how many, on what resources."""

import logging
import math
import os
import re
import socket
import warnings
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, HTTPOptions, RequestRouterConfig
from ray.serve.schema import LoggingConfig

from app.autoscaling import EnginePolicy
from app.engine_deployment import EngineDeployment
from app.ingress import OVERCOMMIT, SPARE, IngressDeployment
from app.resources import gpus_to_ask_for, shard_bundle
from app.router import AffinityRouter
from app.settings import AppSettings
from engine.config import DEFAULT_MAX_NUM_SEQS, EngineConfig
from engine.errors import ConfigError
from engine.hub import find_model
from engine.model_config import load_model_config
from engine.parallel.heads import check_heads
from kernels.cpu_isa import isa_asked_for

logger = logging.getLogger("ray.serve")

METRICS_INTERVAL_S = 0.5
"""Between two reports to the autoscaler, of replicas and of handles; Serve's own default is 10 s. That is in the
application and not in the environment, so that it holds wherever the replicas run."""

LOOK_BACK_S = 2.0
"""Serve takes a reading every fifth part of this."""

ROUTING_STATS_S = 1.0
"""Between two readings of the replicas' queues and caches for the routers."""

LEADER_CPUS = 0.1
"""Share of a core of a replica that leads shards: it only schedules."""

HEALTH_TIMEOUT_S = 10
"""In which a replica has to say that it is well; one that misses it three times in a row is replaced."""

SHORT_WAYS = {
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_PROXY_USE_GRPC": "1",
}
"""What shortens a request's way through Serve: one event loop in a replica, not three, so that no message changes
threads, and gRPC between Serve's Python proxy and the ingress. Serve's throughput mode has these too, but keeps back
log lines. Serve's processes read them when they start, so they can be set only where Ray starts."""

_CONTROL_CALLS = 8
"""Calls for limits, statistics and health that a full replica takes beside its requests."""

_INGRESS_DRAIN_S = 120.0
"""That an ingress which is to go may take at least: a stream can change its engine replica, but not its ingress."""

_INGRESS_REQUESTS = 100_000
"""More than ever come: the ingress answers overload itself, in OpenAI's JSON, which Serve would not."""


def build_application(
    settings: AppSettings, engine_class: type[EngineDeployment] = EngineDeployment
) -> serve.Application:
    """engine_class: another in its place is a benchmark's. Raises `ConfigError` for what cannot start here."""
    elsewhere = _cluster_is_elsewhere()
    if not elsewhere:
        _check_isa()
        if (warning := port_in_use()) is not None:
            logger.warning(warning)
        take_short_ways()
    log = LoggingConfig(log_level=settings.log_level, encoding=settings.log_encoding)
    names = _engine_names(settings)
    engines = [
        _engine(model, name, engine_class, elsewhere).options(logging_config=log).bind(model.engine_config())
        for model, name in zip(settings.each, names, strict=True)
    ]
    ingress = serve.deployment(
        serve.ingress()(IngressDeployment),
        name="ingress",
        num_replicas=settings.num_ingress_replicas,
        max_ongoing_requests=_INGRESS_REQUESTS,
        max_queued_requests=-1,
        ray_actor_options={"num_cpus": 0.1},
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=max(_INGRESS_DRAIN_S, *(m.graceful_shutdown_timeout_s for m in settings.each)),
        logging_config=log,
    )
    return ingress.bind(settings, *engines)


def take_short_ways() -> None:
    """Let a Ray that starts from this process have `SHORT_WAYS`, where the environment does not say otherwise."""
    for name, value in SHORT_WAYS.items():
        os.environ.setdefault(name, value)


def _engine_names(settings: AppSettings) -> list[str]:
    """Of the engine deployments: `engine`, or with the name of the model where there are several."""
    if not settings.models:
        return ["engine"]
    names: list[str] = []
    for model in settings.models:
        name = "engine-" + re.sub(r"[^\w.-]+", "-", model.public_model_name)
        names.append(name if name not in names else f"{name}-{len(names)}")
    return names


def _engine(
    settings: AppSettings, name: str, engine_class: type[EngineDeployment], cluster_is_elsewhere: bool
) -> serve.Deployment:
    config = settings.engine_config()
    num_gpus = gpus_to_ask_for(config.device, config.tensor_parallel_size)
    if not cluster_is_elsewhere:
        _check_model(config)
        for adapter, folder in settings.lora_modules.items():
            if not os.path.isdir(folder):
                raise ConfigError(f"lora_modules: {adapter!r} is to be in {folder}, which is no folder")
    max_num_seqs = config.max_num_seqs or DEFAULT_MAX_NUM_SEQS["cuda" if num_gpus else "cpu"]
    return serve.deployment(
        engine_class,
        name=name,
        **_replicas(settings),
        request_router_config=RequestRouterConfig(
            request_router_class=AffinityRouter, request_routing_stats_period_s=ROUTING_STATS_S
        ),
        # What all ingresses send: Serve would hold the rest back in no fair order.
        max_ongoing_requests=settings.num_ingress_replicas * math.ceil((OVERCOMMIT + SPARE) * max_num_seqs)
        + _CONTROL_CALLS,
        **_resources(config.tensor_parallel_size, num_gpus, settings.shard_placement),
        health_check_period_s=2,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=settings.graceful_shutdown_timeout_s,
    )


def _resources(num_shards: int, num_gpus: int, strategy: str) -> dict[str, Any]:
    """Options of the engine deployment: shares of a core, so that everything finds a place on one, and the GPUs.

    Shards have bundles behind the replica's own, which has no GPU then.
    """
    if num_shards == 1:
        return {"ray_actor_options": {"num_cpus": 0.5, "num_gpus": num_gpus}}
    return {
        "ray_actor_options": {"num_cpus": LEADER_CPUS},
        "placement_group_bundles": [{"CPU": LEADER_CPUS}, *[shard_bundle(num_gpus // num_shards)] * num_shards],
        "placement_group_strategy": strategy,
    }


def _replicas(settings: AppSettings) -> dict[str, Any]:
    """Options of the engine deployment: a fixed number of replicas, or bounds and our policy between them."""
    if settings.max_replicas is None:
        return {"num_replicas": settings.num_replicas}
    policy = AutoscalingPolicy(
        policy_function=EnginePolicy,
        policy_kwargs={
            "ttft_s": settings.target_ttft_s,
            "downscale_delay_s": settings.downscale_delay_s,
            "downscale_to_zero_delay_s": settings.downscale_to_zero_delay_s,
        },
    )
    with warnings.catch_warnings():  # metrics_interval_s: the variables it is to give way to have no effect yet
        warnings.simplefilter("ignore")
        config = AutoscalingConfig(
            min_replicas=settings.min_replicas,
            max_replicas=settings.max_replicas,
            metrics_interval_s=METRICS_INTERVAL_S,
            look_back_period_s=LOOK_BACK_S,
            # The policy waits where that is wise.
            upscale_delay_s=0,
            downscale_delay_s=0,
            policy=policy,
        )
    return {"autoscaling_config": config}


def port_in_use() -> str | None:
    """What to tell a person if something listens where a Serve that starts here will, unless a file says otherwise.

    Serve binds with SO_REUSEPORT: a second one starts without an error, and each gets half of the connections.
    """
    options = HTTPOptions()
    address = (options.host or "127.0.0.1", options.port)
    try:
        socket.create_connection(address, timeout=1).close()
    except OSError:
        return None
    return (
        f"something listens on {address[0]}:{address[1]} already: stop it; or, for another port, copy "
        "ray_configs/single.yaml, change http_options.port there and `serve run` the copy; or, if it is a Serve that "
        "should have this application, set RAY_ADDRESS=auto"
    )


def cluster_is_named() -> bool:
    """Whether the environment names a cluster that runs; `local` asks Ray for a new one here."""
    return os.environ.get("RAY_ADDRESS", "") not in ("", "local")


def _cluster_is_elsewhere() -> bool:
    """Whether Ray runs already, or is to be found by its address: what is here then says little of it."""
    return ray.is_initialized() or cluster_is_named()


def _check_isa() -> None:
    """The replicas, which have this environment too, would fail on it one after the other."""
    try:
        isa_asked_for()
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _check_model(config: EngineConfig) -> None:
    """What of a model would fail each replica is told before Ray starts: a name or path that leads nowhere, more
    positions than it has, or heads that so many ranks cannot share.

    Nothing is fetched here: an alias or a Hub repository is the replicas' matter, where the files are needed.
    """
    path = find_model(config.model)
    if path is None or (config.max_model_len is None and config.tensor_parallel_size == 1):
        return
    model_config = load_model_config(path)
    model_config.max_model_len(config.max_model_len)
    if config.tensor_parallel_size > 1:
        check_heads(model_config, config.tensor_parallel_size)
