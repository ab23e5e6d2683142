"""The inference engine: a Python library with no Ray and no HTTP.

Names load on first use, so that `engine.scheduler` and `engine.block_manager` stay free of torch.
"""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.engine import Engine
    from engine.llm import LLM
    from engine.sampling_params import SamplingParams

if "torch" not in sys.modules:
    # OpenMP reads this once, when torch loads it. By default a thread that waits for another spins, and when a
    # neighbour has taken the other's core it spins for a whole time slice, hundreds of times a step: one busy core
    # then costs nine tenths of the speed.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

_HOMES = {
    "LLM": "engine.llm",
    "Engine": "engine.engine",
    "EngineConfig": "engine.config",
    "SamplingParams": "engine.sampling_params",
}

__all__ = ["LLM", "Engine", "EngineConfig", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'engine' has no attribute {name!r}")
