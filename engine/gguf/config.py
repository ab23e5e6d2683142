"""Translates a GGUF file's metadata into a config in Hugging Face's words.

Source of what is undone here: llama.cpp's converter. What it leaves out of a file, because all published models of the
architecture agree in it, is filled in by the table of families or said below.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from engine.errors import ConfigError
from engine.gguf.file import GGUFFile, open_gguf
from engine.models.families import FAMILIES

_DTYPES = {0: "float32", 1: "float16", 32: "bfloat16"}
"""Names of `general.file_type`; a quantised file has no type of its own and is read as float32."""

ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that are a part of the config."""

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What every published Llama 3.x has; GGUF keeps only the factors that follow from them."""


def hf_config(path: Path) -> dict[str, Any]:
    """The file's metadata as a Hugging Face config. Raises `ConfigError` naming what is not supported."""
    file = open_gguf(path)
    architecture = hf_architecture(file)
    if "token_embd.weight" not in file.tensors:
        raise ConfigError(f"{path} has no tensor token_embd.weight: it is no language model")
    num_heads = file.count("attention.head_count")
    hidden_size = file.count("embedding_length")
    rotary_dim = file.get("rope.dimension_count")
    partial = FAMILIES[architecture].partial_rotary
    head_dim = file.get("attention.key_length") or (not partial and rotary_dim) or hidden_size // num_heads
    if rotary_dim and rotary_dim != head_dim and not partial:
        raise ConfigError(f"{path}: rotary embeddings over {rotary_dim} of {head_dim} elements are not supported")
    if file.get("attention.value_length", head_dim) != head_dim:
        raise ConfigError(f"{path}: values of another length than keys are not supported")
    config = {
        "architectures": [architecture],
        "model_type": FAMILIES[architecture].model_type,
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": file.count("feed_forward_length"),
        "num_hidden_layers": file.count("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": file.get("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": file.count("context_length"),
        "rms_norm_eps": _shortest(file.get("attention.layer_norm_rms_epsilon", 1e-6)),
        "rope_parameters": _rope_parameters(file, head_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in file.tensors,
        "dtype": _DTYPES.get(file.metadata.get("general.file_type", 0), "float32"),
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos_token_ids(file),
        "pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id"),
    }
    if architecture in _OWN_KEYS:
        config |= _OWN_KEYS[architecture](file, config)
    return {key: value for key, value in config.items() if value is not None}


def hf_architecture(file: GGUFFile) -> str:
    """Hugging Face's name of the file's architecture. Raises `ConfigError` listing those that are supported."""
    name = file.metadata.get("general.architecture")
    if name == "llama" and file.get("expert_count"):
        return "MixtralForCausalLM"
    if name == "olmo2" and file.get("attention.sliding_window"):
        return "Olmo3ForCausalLM"
    for architecture, family in FAMILIES.items():
        if family.gguf is not None and family.gguf == name:
            return architecture
    supported = dict.fromkeys(family.gguf for family in FAMILIES.values() if family.gguf)
    raise ConfigError(
        f"{file.path}: the GGUF architecture {name!r} is not supported; supported are {', '.join(supported)}"
    )


def eos_token_ids(file: GGUFFile) -> list[int]:
    """Ids that end an output: of the text, of a turn and of a message."""
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = (file.metadata.get(f"tokenizer.ggml.{name}") for name in names)
    return list(dict.fromkeys(token_id for token_id in ids if token_id is not None))


Config = dict[str, Any]


def _experts(file: GGUFFile, config: Config) -> Config:
    return {
        "num_local_experts": file.count("expert_count"),
        "num_experts_per_tok": file.count("expert_used_count"),
        "moe_intermediate_size": file.get("expert_feed_forward_length"),
        "norm_topk_prob": file.get("expert_weights_norm", True),
        "sliding_window": None,
    }


def _granite(file: GGUFFile, config: Config) -> Config:
    keys = {
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "attention_multiplier": "attention.scale",
        "logits_scaling": "logit_scale",
    }
    return {theirs: _shortest(value) for theirs, ours in keys.items() if (value := file.get(ours))}


def _olmo3(file: GGUFFile, config: Config) -> Config:
    rope = config["rope_parameters"]
    plain = {"rope_theta": rope["rope_theta"], "rope_type": "default"}
    return {
        "sliding_window": file.count("attention.sliding_window"),
        "layer_types": _layer_types(file.get("attention.sliding_window_pattern")),
        "rope_parameters": {"full_attention": rope, "sliding_attention": plain},
    }


def _phi3(file: GGUFFile, config: Config) -> Config:
    trained = file.get("rope.scaling.original_context_length")
    return {"sliding_window": file.get("attention.sliding_window") or None, "original_max_position_embeddings": trained}


def _gemma2(file: GGUFFile, config: Config) -> Config:
    return {
        "query_pre_attn_scalar": _query_scalar(config, 46),
        "sliding_window": file.get("attention.sliding_window"),
        "attn_logit_softcapping": file.get("attn_logit_softcapping"),
        "final_logit_softcapping": file.get("final_logit_softcapping"),
        "hidden_activation": "gelu_pytorch_tanh",
    }


def _gemma3(file: GGUFFile, config: Config) -> Config:
    local = _shortest(file.get("rope.freq_base_swa", 10000.0))
    rope = config["rope_parameters"] | {"rope_theta": _shortest(file.get("rope.freq_base", 1e6))}
    return {
        "query_pre_attn_scalar": _query_scalar(config, 62),
        "sliding_window": file.get("attention.sliding_window"),
        "final_logit_softcapping": file.get("final_logit_softcapping"),
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_parameters": {
            "full_attention": rope,
            "sliding_attention": {"rope_theta": local, "rope_type": "default"},
        },
    }


_OWN_KEYS: dict[str, Callable[[GGUFFile, Config], Config]] = {
    "Qwen3MoeForCausalLM": _experts,
    "MixtralForCausalLM": _experts,
    "GraniteForCausalLM": _granite,
    "Olmo3ForCausalLM": _olmo3,
    "Phi3ForCausalLM": _phi3,
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
}


def _query_scalar(config: Config, largest: int) -> int:
    """The largest Gemma, of `largest` layers, scales by its width for each head; the others by head_dim."""
    if config["num_hidden_layers"] == largest:
        return int(config["hidden_size"]) // int(config["num_attention_heads"])
    return int(config["head_dim"])


def _layer_types(windowed: list[bool] | None) -> list[str] | None:
    if windowed is None:
        return None
    return ["sliding_attention" if is_windowed else "full_attention" for is_windowed in windowed]


def _rope_parameters(file: GGUFFile, head_dim: int) -> Config:
    rotary_dim = file.get("rope.dimension_count", head_dim)
    rope: Config = {"rope_theta": _shortest(file.get("rope.freq_base", 10000.0)), "rope_type": "default"}
    if rotary_dim != head_dim:
        rope["partial_rotary_factor"] = rotary_dim / head_dim
    kind = file.get("rope.scaling.type", "none")
    if "rope_factors_long.weight" in file.tensors:
        return rope | _longrope(file)
    if "rope_freqs.weight" in file.tensors and kind == "none":
        return rope | _llama3(file, rope["rope_theta"], head_dim)
    if kind == "none":
        return rope
    factor = file.get("rope.scaling.factor")
    rope |= {"rope_type": kind, "factor": None if factor is None else _shortest(factor)}
    if kind == "yarn":
        rope |= _yarn(file, rope["factor"])
    return rope


def _yarn(file: GGUFFile, factor: float | None) -> Config:
    keys = {
        "original_max_position_embeddings": "original_context_length",
        "beta_fast": "yarn_beta_fast",
        "beta_slow": "yarn_beta_slow",
    }
    found = {theirs: value for theirs, ours in keys.items() if (value := file.get(f"rope.scaling.{ours}")) is not None}
    scale = file.get("rope.scaling.attn_factor")
    if scale is not None and factor:  # llama.cpp multiplies it with what the paper gives
        found["attention_factor"] = _shortest(scale) * (0.1 * math.log(factor) + 1.0)
    return found


def _longrope(file: GGUFFile) -> Config:
    long, short = (file.read(f"rope_factors_{name}.weight") for name in ("long", "short"))
    found: Config = {
        "rope_type": "longrope",
        "long_factor": [_shortest(value) for value in long],
        "short_factor": [_shortest(value) for value in short],
        "original_max_position_embeddings": file.get("rope.scaling.original_context_length"),
    }
    scale = file.get("rope.scaling.attn_factor")
    return found if scale is None else found | {"attention_factor": _shortest(scale)}


def _llama3(file: GGUFFile, theta: float, head_dim: int) -> Config:
    factors = file.read("rope_freqs.weight")  # [head_dim / 2]
    factor = float(factors.max())
    if not np.allclose(factors, llama3_factors(theta, head_dim, factor), rtol=1e-4):
        raise ConfigError(
            f"{file.path}: the factors in rope_freqs.weight are not those of Llama 3.x, so they are not supported; "
            "use the model's folder in Hugging Face layout"
        )
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}


def llama3_factors(theta: float, head_dim: int, factor: float) -> list[float]:
    """What Llama 3's scaling divides each frequency by: 1 for short waves, `factor` for long, smooth between."""
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    factors = []
    for i in range(0, head_dim, 2):
        turns = _LLAMA3["original_max_position_embeddings"] / (2 * math.pi * theta ** (i / head_dim))
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors


def _shortest(value: float) -> float:
    """A float32 as a person would write it: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
