"""The shape of a model: what a checkpoint's config says, in one dataclass, whatever file it came from."""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: `theta` and, for scaled kinds, Hugging Face's `rope_parameters` as they stand."""

    theta: float = 10000.0
    kind: str = "default"
    parameters: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A Llama-shaped decoder. Sizes are in elements, counts in heads, layers or tokens."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope: RopeConfig = field(default_factory=RopeConfig)
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    qk_norm: bool = False
    dtype: str = "float32"
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Architecture:
    """What sets one Llama-shaped architecture apart from another, and what its config leaves out."""

    qk_norm: bool = False
    head_dim: int | None = None
    """Where the config gives no head_dim; None is hidden_size / num_attention_heads."""


ARCHITECTURES = {
    "LlamaForCausalLM": Architecture(),
    "Qwen3ForCausalLM": Architecture(qk_norm=True, head_dim=128),
}

ROPE_KINDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""Kinds of rotary embedding, and the parameters that each must have."""

DTYPES = ("float32", "bfloat16", "float16")


def load_model_config(path: Path) -> ModelConfig:
    """Read the shape of the model in a folder (config.json, generation_config.json) or of a `.gguf` file.

    Raises `ConfigError` that names the file and the key.
    """
    path = Path(path)
    if is_gguf(path):
        from engine.gguf_to_hf import hf_config

        return from_hf(hf_config(path), str(path))
    source = path / "config.json"
    config = from_hf(read_json(source), str(source))
    # A token that is not in the vocabulary is never made, so it ends nothing; some checkpoints name one.
    eos = tuple(i for i in configured_eos_token_ids(path) if i < config.vocab_size)
    return dataclasses.replace(config, eos_token_ids=eos)


def is_gguf(path: Path) -> bool:
    """Whether a model's path is a GGUF file, not a folder in Hugging Face layout; it need not exist."""
    return path.suffix == ".gguf" and not path.is_dir()


def configured_eos_token_ids(folder: Path) -> tuple[int, ...]:
    """EOS ids of config.json, then those that only generation_config.json names. Raises `ConfigError`."""
    ids: list[int] = []
    for file in (folder / "config.json", folder / "generation_config.json"):
        if file.is_file():
            ids += _token_ids(read_json(file), str(file))
    return tuple(dict.fromkeys(ids))


def from_hf(config: dict[str, Any], source: str) -> ModelConfig:
    """Translate a config in Hugging Face's words; `source` is the file named in errors."""
    read = _Reader(config, source)
    name = read.architecture()
    architecture = ARCHITECTURES[name]
    read.refuse_unsupported()
    hidden_size = read.count("hidden_size")
    num_heads = read.count("num_attention_heads")
    num_kv_heads = read.count("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise read.error("num_key_value_heads", f"must divide num_attention_heads ({num_heads})")
    if config.get("head_dim") is None and architecture.head_dim is None and hidden_size % num_heads:
        raise read.error("num_attention_heads", f"must divide hidden_size ({hidden_size}) where head_dim is not given")
    head_dim = read.count("head_dim", default=architecture.head_dim or hidden_size // num_heads)
    if head_dim % 2:
        raise read.error("head_dim", "must be even for rotary embeddings")
    return ModelConfig(
        architecture=name,
        vocab_size=read.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=read.count("intermediate_size"),
        num_layers=read.count("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=read.count("max_position_embeddings"),
        rms_norm_eps=read.number("rms_norm_eps", default=1e-6),
        rope=read.rope(),
        tie_word_embeddings=read.flag("tie_word_embeddings"),
        attention_bias=read.flag("attention_bias"),
        qk_norm=architecture.qk_norm,
        dtype=read.dtype(),
        eos_token_ids=tuple(dict.fromkeys(_token_ids(config, source))),
    )


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object. Raises `ConfigError` that names the file."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ConfigError(f"{file} is no valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{file} must hold a JSON object, not a {type(value).__name__}")
    return value


class _Reader:
    """Takes checked values out of one config."""

    def __init__(self, config: dict[str, Any], source: str) -> None:
        self.config = config
        self.source = source

    def error(self, key: str, problem: str) -> ConfigError:
        given = f"is {self.config[key]!r}, but " if key in self.config else ""
        return ConfigError(f"{self.source}: {key} {given}{problem}")

    def architecture(self) -> str:
        names = self.config.get("architectures")
        if not isinstance(names, list) or not names:
            raise self.error("architectures", f"must be a list with one of {', '.join(ARCHITECTURES)}")
        for name in names:
            if name in ARCHITECTURES:
                return str(name)
        raise ConfigError(
            f"{self.source}: the architecture {', '.join(map(str, names))} is not supported; supported are "
            f"{', '.join(ARCHITECTURES)}"
        )

    def refuse_unsupported(self) -> None:
        if self.config.get("quantization_config"):
            raise self.error("quantization_config", "a quantised checkpoint of this kind is not supported")
        if self.config.get("hidden_act", "silu") != "silu":
            raise self.error("hidden_act", "only 'silu' is supported")
        if self.config.get("mlp_bias"):
            raise self.error("mlp_bias", "an MLP with biases is not supported")
        if self.config.get("use_sliding_window"):
            raise self.error("use_sliding_window", "sliding-window attention is not supported")

    def count(self, key: str, default: int | None = None) -> int:
        value = self.config.get(key)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(key, "must be a whole number of at least 1")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.config.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.error(key, "must be a number above 0")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.config.get(key, False)
        if not isinstance(value, bool):
            raise self.error(key, "must be true or false")
        return value

    def dtype(self) -> str:
        key = "dtype" if self.config.get("dtype") is not None else "torch_dtype"
        value = self.config.get(key) or "float32"
        if value not in DTYPES:
            raise self.error(key, f"must be one of {', '.join(DTYPES)}")
        return str(value)

    def rope(self) -> RopeConfig:
        # transformers 5 writes rope_parameters; before, rope_theta stood alone and rope_scaling beside it.
        key = "rope_parameters" if self.config.get("rope_parameters") is not None else "rope_scaling"
        parameters = self.config.get(key) or {}
        if not isinstance(parameters, dict):
            raise self.error(key, "must be an object")
        if any(isinstance(value, dict) for value in parameters.values()):
            raise self.error(key, "rotary embeddings that differ between kinds of layer are not supported")
        theta = parameters.get("rope_theta", self.config.get("rope_theta", 10000.0))
        if isinstance(theta, bool) or not isinstance(theta, int | float) or not theta > 0:
            raise ConfigError(f"{self.source}: rope_theta is {theta!r}, but must be a number above 0")
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if kind not in ROPE_KINDS:
            raise self.error(key, f"only the rope types {', '.join(ROPE_KINDS)} are supported")
        if parameters.get("partial_rotary_factor", self.config.get("partial_rotary_factor")) not in (
            None,
            1,
            1.0,
        ):
            raise self.error(key, "rotary embeddings over a part of the head are not supported")
        for name in ROPE_KINDS[kind]:
            value = parameters.get(name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise self.error(key, f"must have {name}, a number above 0, for the rope type {kind}")
        return RopeConfig(float(theta), kind, dict(parameters) if kind != "default" else {})


def _token_ids(config: dict[str, Any], source: str) -> list[int]:
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise ConfigError(f"{source}: eos_token_id is {value!r}, but must be a token id or a list of them")
    return ids
