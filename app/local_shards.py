"""Tensor parallelism without Serve: what `LLM(..., tensor_parallel_size=n)` finds by its entry point."""

import logging

import ray
from ray.util.placement_group import placement_group, remove_placement_group

from app.resources import gpus_to_ask_for, shard_bundle
from app.shards import ShardedRunner, ShardGroup
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.runner import Runner

PLACING_S = 60.0

_num_engines: int | None = None
"""Of this process on the Ray that the first of them started; None where there is no such Ray."""


def start(config: EngineConfig) -> Runner:
    """The ranks on a Ray of their own, which ends with the last runner, or on one that this process is connected to.

    Raises `ConfigError` where the ranks find no place, and what a rank raises.
    """
    global _num_engines
    size = config.tensor_parallel_size
    if not ray.is_initialized():
        ray.init(
            address="local",
            num_cpus=size,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.WARNING,
        )
        _num_engines = 0
    elif _num_engines is None:
        return LocalShards(config)
    _num_engines += 1
    try:
        return LocalShards(config)
    except BaseException:
        _leave_own_ray()
        raise


def _leave_own_ray() -> None:
    """End the Ray that was started here, with the last engine on it."""
    global _num_engines
    if _num_engines is None:
        return
    _num_engines -= 1
    if not _num_engines:
        _num_engines = None
        ray.shutdown()


class LocalShards(ShardedRunner):
    """Leads ranks in a placement group of their own, which goes with them."""

    def __init__(self, config: EngineConfig) -> None:
        size = config.tensor_parallel_size
        bundle = shard_bundle(gpus_to_ask_for(config.device, size) // size)
        self._bundles = placement_group([bundle] * size, strategy="PACK")
        try:
            if not self._bundles.wait(PLACING_S):
                raise ConfigError(
                    f"tensor_parallel_size is {size}, and Ray has not {size} times {bundle} free: "
                    f"{ray.available_resources()}"
                )
            super().__init__(ShardGroup(config, (self._bundles, 0)), config.shard_timeout_s)
        except BaseException:
            remove_placement_group(self._bundles)
            raise

    def close(self) -> None:
        if self._closing.is_set():
            return
        super().close()
        remove_placement_group(self._bundles)
        _leave_own_ray()
