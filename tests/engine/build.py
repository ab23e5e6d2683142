"""Engines for tests: small, on the CPU, with a choice of attention."""

from pathlib import Path
from unittest import mock

from engine import runner_setup
from engine.config import EngineConfig
from engine.engine import Engine
from kernels.attention import AttentionBackend
from kernels.attention.torch_backend import TorchBackend

SHAPE = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
"""What a config must say of a model in Hugging Face's words, for tests of how it is read."""

OVERLAPPED: dict[str, dict[str, object]] = {
    "two in flight": {"async_scheduling": True},
    "two in flight, late": {"async_scheduling": True},
    "two in flight, a pool that preempts": {
        "async_scheduling": True,
        "num_gpu_blocks_override": 9,
        "max_model_len": 120,
    },
}
"""Conditions with two steps in flight; where a name says late, the test wraps the runner in a `LateRunner`."""


def build_engine(path: Path, attention: str = "cpu", **settings: object) -> Engine:
    """attention: "cpu" for the fastest there is on a CPU, "torch" for the reference."""
    defaults: dict[str, object] = {"device": "cpu", "dtype": "float32"}
    if "kv_cache_memory_bytes" not in settings:
        defaults["num_gpu_blocks_override"] = 128
    config = EngineConfig.from_kwargs(model=str(path), **(defaults | settings))
    if attention == "cpu":
        return Engine.from_config(config)

    def reference_backend(*args: object) -> AttentionBackend:
        return TorchBackend()

    with mock.patch.object(runner_setup, "select_backend", reference_backend):
        return Engine.from_config(config)
