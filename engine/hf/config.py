"""Translates a config in Hugging Face's words to a `ModelConfig`, by the table of families."""

import reprlib
from collections.abc import Mapping
from typing import Any

from engine.errors import ConfigError
from engine.hf.rope import rope_configs
from engine.model_config import Activation, ExpertsConfig, LayerConfig, ModelConfig, token_ids
from engine.models.families import FAMILIES, Family

DTYPES = ("float32", "bfloat16", "float16")

ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}

MOST = {
    "num_hidden_layers": 10_000,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 24,
    "moe_intermediate_size": 1 << 24,
    "num_attention_heads": 1 << 16,
    "num_key_value_heads": 1 << 16,
    "head_dim": 1 << 16,
    "vocab_size": 1 << 24,
    "max_position_embeddings": 1 << 24,
    "num_experts": 1 << 14,
    "num_local_experts": 1 << 14,
}
"""More than any model has: a damaged config is told at once, not when memory ends."""

_MOST_COUNT, _MOST_NUMBER = (1 << 31) - 1, 1e30

_WINDOWED, _FULL = "sliding_attention", "full_attention"


def from_hf(config: Mapping[str, Any], source: str) -> ModelConfig:
    """Translate a config in Hugging Face's words; `source` is the file named in errors.

    Of a model of several parts, its text part. Raises `ConfigError` that names the key, or the architecture and those
    that are supported.
    """
    name, text = _architecture(config, source)
    family = FAMILIES[name]
    read = ConfigReader(text, family.defaults, source)
    read.refuse_unsupported()
    heads, kv_heads, head_dim = _heads(read)
    num_layers = read.count("num_hidden_layers")
    query_scale = read.optional("query_pre_attn_scalar")
    attention_bias = read.flag("attention_bias")
    hidden_size = read.count("hidden_size")
    return ModelConfig(
        architecture=name,
        vocab_size=read.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=read.count("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=read.count("max_position_embeddings"),
        layers=_layers(read, family, num_layers, head_dim),
        rms_norm_eps=read.number("rms_norm_eps", default=1e-6),
        activation=read.activation(),
        norms=family.norms,
        qk_norm=family.qk_norm,
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=_output_bias(read, family, attention_bias),
        mlp_bias=read.flag("mlp_bias"),
        attention_scale=read.optional("attention_multiplier") or (query_scale**-0.5 if query_scale else 0.0),
        attention_soft_cap=read.optional("attn_logit_softcapping") or 0.0,
        logit_soft_cap=read.optional("final_logit_softcapping") or 0.0,
        embedding_scale=hidden_size**0.5 if family.scaled_embeddings else read.optional("embedding_multiplier") or 1.0,
        residual_scale=read.optional("residual_multiplier") or 1.0,
        logit_scale=1.0 / (read.optional("logits_scaling") or 1.0),
        experts=_experts(read),
        norm_offset=family.norm_offset,
        fused_projections=family.fused_projections,
        tie_word_embeddings=read.flag("tie_word_embeddings"),
        dtype=read.dtype(),
        eos_token_ids=tuple(dict.fromkeys(token_ids(dict(config), source))),
    )


class ConfigReader:
    """Takes checked values out of one config. defaults: the family's, for keys that are missing or null."""

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any], source: str) -> None:
        self.config = config
        self.defaults = defaults
        self.source = source

    def error(self, key: str, problem: str) -> ConfigError:
        given = f"is {reprlib.repr(self.config[key])}, but " if key in self.config else ""
        return ConfigError(f"{self.source}: {key} {given}{problem}")

    def get(self, key: str, default: Any = None) -> Any:
        """The config's value, or the family's, or `default`; of each, null counts as not there."""
        value = self.config.get(key)
        value = self.defaults.get(key) if value is None else value
        return default if value is None else value

    def count(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(key, "must be a whole number of at least 1")
        if value > (most := MOST.get(key, _MOST_COUNT)):
            raise self.error(key, f"must be at most {most}")
        return value

    def number(self, key: str, default: float) -> float:
        # 0 is an error, where a null is none.
        value = self.config[key] if self.config.get(key) is not None else self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _MOST_NUMBER:
            raise self.error(key, f"must be a number above 0 and below {_MOST_NUMBER:g}")
        return float(value)

    def optional(self, key: str) -> float | None:
        """A number above 0; None where it is null, or where the family does not know the key."""
        if key not in self.defaults or self.is_off(key):
            return None
        return self.number(key, default=1.0)

    def is_off(self, key: str) -> bool:
        """Whether a thing that null switches off is off, by the config or, where it has no such key, by the family."""
        return (self.config[key] if key in self.config else self.defaults.get(key)) is None

    def flag(self, key: str) -> bool:
        value = self.get(key, False)
        if not isinstance(value, bool):
            raise self.error(key, "must be true or false")
        return value

    def activation(self) -> Activation:
        key = "hidden_activation" if "hidden_activation" in self.defaults else "hidden_act"
        value = self.get(key, "silu")
        if not isinstance(value, str) or value not in ACTIVATIONS:
            raise self.error(key, f"only {', '.join(map(repr, ACTIVATIONS))} are supported")
        return ACTIVATIONS[value]

    def dtype(self) -> str:
        key = "dtype" if self.config.get("dtype") is not None else "torch_dtype"
        value = self.config.get(key) or "float32"
        if value not in DTYPES:
            raise self.error(key, f"must be one of {', '.join(DTYPES)}")
        return str(value)

    def refuse_unsupported(self) -> None:
        if self.get("use_bidirectional_attention"):
            raise self.error("use_bidirectional_attention", "only causal attention is supported")


def _architecture(config: Mapping[str, Any], source: str) -> tuple[str, Mapping[str, Any]]:
    """The architecture to serve and its config: of a model of several parts, those of the text part."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{source}: architectures must be a list with one of {', '.join(FAMILIES)}")
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unnamed") if isinstance(quantization, dict) else quantization
        raise ConfigError(
            f"{source}: the weights are quantised by {method!r} (quantization_config), which is not supported. "
            "Supported are float32, bfloat16 and float16 in safetensors, and GGUF files (Q4_0 to Q8_0, Q2_K to Q6_K, "
            "IQ4_NL); quantization=int8 quantises full weights when they are loaded"
        )
    for name in names:
        if name in FAMILIES:
            return str(name), config
    text = config.get("text_config")
    if isinstance(text, dict):
        for name, family in FAMILIES.items():
            if text.get("model_type") == family.model_type:
                inherited = {key: config[key] for key in ("dtype", "torch_dtype") if config.get(key) is not None}
                return name, inherited | text
    raise ConfigError(
        f"{source}: the architecture {', '.join(map(str, names))} is not supported; supported are {', '.join(FAMILIES)}"
    )


def _heads(read: ConfigReader) -> tuple[int, int, int]:
    hidden_size, heads = read.count("hidden_size"), read.count("num_attention_heads")
    kv_heads = read.count("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise read.error("num_key_value_heads", f"must divide num_attention_heads ({heads})")
    if read.get("head_dim") is None and hidden_size % heads:
        raise read.error("num_attention_heads", f"must divide hidden_size ({hidden_size}) where head_dim is not given")
    head_dim = read.count("head_dim", default=hidden_size // heads)
    if head_dim % 2:
        raise read.error("head_dim", "must be even for rotary embeddings")
    return heads, kv_heads, head_dim


def _output_bias(read: ConfigReader, family: Family, attention_bias: bool) -> bool:
    if family.output_bias is not None:
        return family.output_bias
    return read.flag("attention_out_bias") if "attention_out_bias" in family.defaults else attention_bias


def _layers(read: ConfigReader, family: Family, count: int, head_dim: int) -> tuple[LayerConfig, ...]:
    windows, turning, sparse = _windows(read, family, count), _turning(read, count), _sparse(read, count)
    full, windowed = rope_configs(read, family, head_dim)
    return tuple(
        LayerConfig((windowed if windows[i] else full) if turning[i] else None, windows[i], sparse[i])
        for i in range(count)
    )


def _windows(read: ConfigReader, family: Family, count: int) -> list[int]:
    """Each layer's window; 0 where it sees all."""
    off = "use_sliding_window" in family.defaults and not read.flag("use_sliding_window")
    if family.windows == "none" or off or read.is_off("sliding_window"):
        return [0] * count
    window = read.count("sliding_window")
    if family.windows == "all":
        return [window] * count
    types = read.get("layer_types")
    if types is None:
        types = [_WINDOWED if is_windowed else _FULL for is_windowed in _default_windows(read, family, count)]
    if not isinstance(types, list) or len(types) != count or any(t not in (_WINDOWED, _FULL) for t in types):
        raise read.error("layer_types", f"must be a list of {count}, each {_WINDOWED!r} or {_FULL!r}")
    return [window if kind == _WINDOWED else 0 for kind in types]


def _default_windows(read: ConfigReader, family: Family, count: int) -> list[bool]:
    if "max_window_layers" in family.defaults:
        first = read.get("max_window_layers")
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise read.error("max_window_layers", "must be a whole number of at least 0")
        return [i >= first for i in range(count)]
    if "no_rope_layers" in family.defaults:
        return [not turns for turns in _turning(read, count)]
    every = read.count("sliding_window_pattern") if "sliding_window_pattern" in family.defaults else family.full_every
    return [every == 1 or (i + 1) % every != 0 for i in range(count)]


def _turning(read: ConfigReader, count: int) -> list[bool]:
    """Whether each layer's q and k turn."""
    if "no_rope_layers" not in read.defaults:
        return [True] * count
    given = read.get("no_rope_layers")
    if given is None:
        every = read.count("no_rope_layer_interval")
        return [(i + 1) % every != 0 for i in range(count)]
    if not isinstance(given, list) or len(given) != count:
        raise read.error("no_rope_layers", f"must be a list of {count} numbers, 0 where a layer has no RoPE")
    return [bool(turns) for turns in given]


def _experts(read: ConfigReader) -> ExpertsConfig | None:
    if "num_experts_per_tok" not in read.defaults:
        return None
    key = "num_experts" if read.config.get("num_experts") is not None else "num_local_experts"
    count, per_token = read.count(key), read.count("num_experts_per_tok")
    if per_token > count:
        raise read.error("num_experts_per_tok", f"must be at most the number of experts ({count})")
    size = read.count("moe_intermediate_size" if "moe_intermediate_size" in read.defaults else "intermediate_size")
    return ExpertsConfig(count, per_token, size, read.flag("norm_topk_prob"))


def _sparse(read: ConfigReader, count: int) -> list[bool]:
    """Whether each layer is a mixture of experts."""
    if "num_experts_per_tok" not in read.defaults:
        return [False] * count
    every, dense = read.count("decoder_sparse_step", default=1), read.get("mlp_only_layers", [])
    if not isinstance(dense, list):
        raise read.error("mlp_only_layers", "must be a list of layers' numbers")
    return [i not in dense and (i + 1) % every == 0 for i in range(count)]
