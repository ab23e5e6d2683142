"""What a person may set of the engine, checked once; field names as in vLLM."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal, Self

from engine.errors import ConfigError
from engine.unknown_settings import unknown_settings

DEFAULT_MODEL = "smollm2-135m"

DEFAULT_MAX_NUM_SEQS = {"cpu": 64, "cuda": 256}
DEFAULT_MAX_NUM_BATCHED_TOKENS = {"cpu": 512, "cuda": 8192}
"""By device. A step of a CPU is kept short, since running streams wait for the prompts that share it."""

ALIASES = {"model_path": "model", "cache_dtype": "kv_cache_dtype"}
"""Other names of a setting, taken wherever settings are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine. None and 0 mean "choose for me"; what was chosen is logged at the start.

    model: an alias (`smollm2-135m`), a folder in Hugging Face layout, a `.gguf` file, or a Hub repository id.
    load_format: "dummy" makes seeded random weights from the model's config alone.
    dtype: of weights and activations; auto is float32 on a CPU, and on a GPU the checkpoint's own type: bfloat16 in
        place of float32, float16 in place of bfloat16 where the card has no tensor cores for that.
    quantization: int8 computes weights and activations in 8 bits, on a CPU alone (docs/quantization.md); none, or
        None, keeps what the checkpoint holds; auto is int8 on a CPU unless `dtype` is given.
    kv_cache_dtype: what the KV cache stores; auto is bfloat16 where auto made the weights int8, else the type of the
        activations; fp8 is float8 e4m3.
    max_model_len: longest prompt plus output, tokens; by default what the model was trained for.
    gpu_memory_utilization: share of the GPU's memory for weights, activations and KV cache together.
    kv_cache_memory_bytes: KV cache size in bytes, instead of the share above; on a CPU the default is a
        quarter of the available memory and at most 4 GiB.
    num_gpu_blocks_override: KV cache size in blocks, over both settings above.
    max_num_seqs: sequences that run at once.
    max_num_batched_tokens: tokens that one step computes at most; a longer prompt is cut in chunks of it.
    enforce_eager: run decode steps without CUDA graphs.
    compilation: compile the forward with torch.compile, on a GPU; the start takes a minute longer.
    async_scheduling: plan and launch a step while the one before it runs; by default on a GPU.
    swap_space: GiB of host memory for the KV of preempted requests, which come back from there where a copy costs less
        than computing again; 0: none.
    block_size: tokens a KV block; 0 is the attention backend's choice.
    seed: of dummy weights.
    generation_config: "auto" samples by the model's generation_config.json where a request does not say how; "vllm"
        leaves that file unread.
    num_threads: threads of a CPU engine; 0 is one for each core that this process may use. Of each rank, whose default
        is a share of the cores of its host.
    tensor_parallel_size: ranks that share each layer's weights and compute it together.
    shard_timeout_s: seconds that a rank may take for a step, or say nothing, before the engine counts as lost.
    enable_lora: requests may come with adapters (docs/lora.md).
    max_loras: adapters that a batch may have; each takes memory of the device, as much as max_lora_rank needs.
    max_lora_rank: highest rank of an adapter.
    max_cpu_loras: adapters that the host keeps, those of max_loras among them; by default as many.

    Raises `ConfigError` naming the setting, what was given and what is allowed.
    """

    model: str = DEFAULT_MODEL
    load_format: Literal["auto", "dummy"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    quantization: Literal["auto", "int8", "none"] | None = "auto"
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "int8", "fp8"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_model_len: int | None = None
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    swap_space: float = 0.0
    block_size: int = 0
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
    compilation: bool = False
    async_scheduling: bool | None = None
    seed: int = 0
    num_threads: int = 0
    tensor_parallel_size: int = 1
    shard_timeout_s: float = 30.0
    trust_remote_code: bool = False
    generation_config: Literal["auto", "vllm"] = "auto"
    enable_lora: bool = False
    max_loras: int = 4
    max_lora_rank: int = 16
    max_cpu_loras: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_model_len", "kv_cache_memory_bytes", "num_gpu_blocks_override", "max_num_seqs",
                     "max_num_batched_tokens"):  # fmt: skip
            value = getattr(self, name)
            if value is not None:
                _at_least(name, value, 2 if name == "max_model_len" else 1)
        for name in ("block_size", "num_threads"):
            _at_least(name, getattr(self, name), 0)
        for name in ("tensor_parallel_size", "max_loras", "max_lora_rank"):
            _at_least(name, getattr(self, name), 1)
        if self.max_cpu_loras is not None:
            _at_least("max_cpu_loras", self.max_cpu_loras, self.max_loras)
        for name, most in (
            ("max_num_seqs", 65_536), ("num_threads", 1024), ("tensor_parallel_size", 1024), ("max_loras", 1024),
            ("max_lora_rank", 512),
        ):  # fmt: skip
            if (getattr(self, name) or 0) > most:
                raise ConfigError(f"{name} must be at most {most}, got {getattr(self, name)}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ConfigError(f"seed must be a whole number, got {self.seed!r}")
        for name in (
            "enable_chunked_prefill",
            "enable_prefix_caching",
            "enforce_eager",
            "compilation",
            "trust_remote_code",
            "enable_lora",
        ):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be true or false, got {getattr(self, name)!r}")
        if not (self.async_scheduling is None or isinstance(self.async_scheduling, bool)):
            raise ConfigError(f"async_scheduling must be true, false or unset, got {self.async_scheduling!r}")
        if not (_is_number(self.gpu_memory_utilization) and 0.0 < self.gpu_memory_utilization <= 1.0):
            raise ConfigError(
                f"gpu_memory_utilization must be above 0 and at most 1, got {self.gpu_memory_utilization!r}"
            )
        if not (_is_number(self.swap_space) and 0 <= self.swap_space < math.inf):
            raise ConfigError(f"swap_space must be a number of GiB, 0 or more, got {self.swap_space!r}")
        if not (_is_number(self.shard_timeout_s) and 0 < self.shard_timeout_s < math.inf):
            raise ConfigError(f"shard_timeout_s must be a number of seconds above 0, got {self.shard_timeout_s!r}")
        for name, allowed in (
            ("load_format", ("auto", "dummy")),
            ("dtype", ("auto", "float32", "bfloat16", "float16")),
            ("kv_cache_dtype", ("auto", "float32", "bfloat16", "int8", "fp8")),
            ("device", ("auto", "cpu", "cuda")),
            ("generation_config", ("auto", "vllm")),
        ):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        if self.quantization not in (None, "auto", "int8", "none"):
            raise ConfigError(f"quantization must be auto, int8 or none, got {self.quantization!r}")
        if not self.model or not isinstance(self.model, str):
            raise ConfigError(f"model must be a name or a path, got {self.model!r}")
        self.check_device(self.device, self.dtype)

    def check_device(self, device: str, dtype: str) -> None:
        """Raise `ConfigError` if some settings cannot be had together, on a device and with activations of this type.

        `auto` as either is what is not known yet.
        """
        if self.quantization == "int8" and (device == "cuda" or dtype not in ("auto", "float32")):
            raise ConfigError(
                f"quantization int8 is for a CPU and float32 activations, but device is {device} and dtype is {dtype}: "
                "leave one of them out"
            )
        if not self.compilation:
            return
        if device == "cpu":
            raise ConfigError("compilation is for a GPU: on a CPU the C++ kernels are faster")
        if self.tensor_parallel_size > 1:
            raise ConfigError("compilation is for a model on one GPU: leave it off, or tensor_parallel_size at 1")
        if self.enable_lora:
            raise ConfigError("compilation and enable_lora cannot be had together: set one of them")

    @classmethod
    def from_kwargs(cls, **settings: Any) -> Self:
        """Build from keyword arguments; aliases are taken, an unknown name is an error that says which is meant."""
        for alias, name in ALIASES.items():
            if alias in settings:
                if name in settings:
                    raise ConfigError(f"{alias} and {name} are one setting: give one of them")
                settings[name] = settings.pop(alias)
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(settings) - known):
            raise ConfigError(unknown_settings(unknown, known))
        return cls(**settings)


def _at_least(name: str, value: object, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(f"{name} must be a whole number of at least {low}, got {value!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
