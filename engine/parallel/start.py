"""Who runs the ranks of a model in other processes: a package above this one, which is found by its entry point."""

from collections.abc import Callable
from importlib.metadata import entry_points

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.runner import Runner

ENTRY_POINT = "nanoserve.shards"

StartShards = Callable[[EngineConfig], Runner]
"""Starts `tensor_parallel_size` ranks and returns the runner that leads them."""


def start_installed_shards(config: EngineConfig) -> Runner:
    """By what is installed for it. Raises `ConfigError` if nothing is."""
    for point in entry_points(group=ENTRY_POINT):
        start: StartShards = point.load()
        return start(config)
    raise ConfigError(
        f"tensor_parallel_size is {config.tensor_parallel_size}, but nothing is installed that runs several ranks: "
        f"install the whole of nanoserve (entry point {ENTRY_POINT}), or leave the setting at 1"
    )
