"""The device, and the numbers a model runs in there: of activations, weights and KV cache."""

import logging
from dataclasses import dataclass

import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.layers.linear import Quantization
from engine.model_config import ModelConfig
from kernels import cpu_ops

logger = logging.getLogger(__name__)

_KV_DTYPES = {
    "auto": None,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}


@dataclass(frozen=True, slots=True)
class Precision:
    """dtype: of activations, and of weights that are not quantised. kv_dtype: what the cache stores; None: dtype."""

    dtype: torch.dtype
    quantization: Quantization | None
    kv_dtype: torch.dtype | None

    def __str__(self) -> str:
        weights = f", weights in {self.quantization}" if self.quantization else ""
        return str(self.dtype).removeprefix("torch.") + weights


def choose_device(config: EngineConfig) -> torch.device:
    """Raises `ConfigError` if a GPU is asked for and there is none."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but there is no GPU that torch can use; set device to cpu or auto")
    if config.device == "auto" and not torch.cuda.is_available():
        logger.warning("no GPU that torch can use: running on the CPU")
        return torch.device("cpu")
    return torch.device("cpu" if config.device == "cpu" else "cuda")


def choose_precision(config: EngineConfig, model_config: ModelConfig, device: torch.device) -> Precision:
    """What the settings leave open is chosen for speed, at the quality that docs/quantization.md measures.

    Raises `ConfigError` for what cannot run there.
    """
    dtype = _dtype(config, model_config, device)
    kv_dtype = _KV_DTYPES[config.kv_cache_dtype]
    config.check_device(device.type, str(dtype).removeprefix("torch."))
    if config.quantization == "int8":
        return Precision(dtype, "int8", kv_dtype)
    # Who names a type wants its numbers. Without the C++ kernels int8 is slower than float32.
    if config.quantization == "auto" and config.dtype == "auto" and device.type == "cpu" and cpu_ops.load():
        logger.info("weights in int8, as the fastest on a CPU; for exact numbers set dtype to float32")
        # An int8 cache adds an eighth to the error of int8 weights for a few per cent of the speed.
        return Precision(dtype, "int8", kv_dtype or torch.bfloat16)
    return Precision(dtype, None, kv_dtype)


def _dtype(config: EngineConfig, model_config: ModelConfig, device: torch.device) -> torch.dtype:
    name: str = config.dtype
    if name == "auto":
        # Without special instructions a CPU only emulates the narrow types; a GPU has no use for the wide one.
        wanted = "bfloat16" if model_config.dtype == "float32" else model_config.dtype
        if device.type == "cuda" and wanted == "bfloat16" and torch.cuda.get_device_capability(device) < (8, 0):
            # Such cards have tensor cores for float16 alone, which Gemma's activations overflow.
            wanted = "float32" if model_config.architecture.startswith("Gemma") else "float16"
        name = "float32" if device.type == "cpu" else wanted
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
