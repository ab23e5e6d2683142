"""Translates a GGUF file into Hugging Face's terms: config keys, parameter names and the layout of q and k.

Source of the conversion that is undone here: llama.cpp's convert_hf_to_gguf.py.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.errors import ConfigError
from engine.gguf_file import GGUFFile, open_gguf

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""GGUF's name of an architecture, and Hugging Face's."""

_PERMUTED = ("llama",)
"""Architectures whose q and k rows GGUF stores interleaved, for a rotation of neighbours."""

_LAYER_MODULES = (
    "input_layernorm", "post_attention_layernorm",
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "self_attn.q_norm", "self_attn.k_norm",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip

_DTYPES = {0: "float32", 1: "float16", 32: "bfloat16"}
"""Names of `general.file_type`; a quantised file has no type of its own and is read as float32."""

_ROPE_FACTORS = "rope_freqs.weight"
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What every published Llama 3.x has; GGUF keeps only the factors that follow from them."""


def hf_config(path: Path) -> dict[str, Any]:
    """The file's metadata as a Hugging Face config. Raises `ConfigError` naming what is not supported."""
    file = open_gguf(path)
    architecture = _architecture(file)
    if file.get("expert_count"):
        raise ConfigError(f"{path}: mixture-of-experts models are not supported (expert_count is set)")
    if "token_embd.weight" not in file.tensors:
        raise ConfigError(f"{path} has no tensor token_embd.weight: it is no language model")
    num_heads = file.count("attention.head_count")
    hidden_size = file.count("embedding_length")
    rotary_dim = file.get("rope.dimension_count")
    head_dim = file.get("attention.key_length") or rotary_dim or hidden_size // num_heads
    if rotary_dim and rotary_dim != head_dim:
        raise ConfigError(f"{path}: rotary embeddings over {rotary_dim} of {head_dim} elements are not supported")
    if file.get("attention.value_length", head_dim) != head_dim:
        raise ConfigError(f"{path}: values of another length than keys are not supported")
    config = {
        "architectures": [architecture],
        "model_type": file.metadata["general.architecture"],
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
        "hidden_act": "silu",
        "dtype": _DTYPES.get(file.metadata.get("general.file_type", 0), "float32"),
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos_token_ids(file),
        "pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id"),
    }
    return {key: value for key, value in config.items() if value is not None}


def eos_token_ids(file: GGUFFile) -> list[int]:
    """Ids that end an output: of the text, of a turn and of a message."""
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = (file.metadata.get(f"tokenizer.ggml.{name}") for name in names)
    return list(dict.fromkeys(token_id for token_id in ids if token_id is not None))


def iter_tensors(path: Path) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """Yield (Hugging Face parameter name, float32 array) of each tensor; one without such a name keeps its own.

    Raises `ConfigError` naming the file.
    """
    file = open_gguf(path)
    modules = _hf_modules(file)
    num_heads = file.count("attention.head_count")
    heads = {"q_proj": num_heads, "k_proj": file.get("attention.head_count_kv", num_heads)}
    permuted = file.metadata["general.architecture"] in _PERMUTED
    for name in file.tensors:
        if name == _ROPE_FACTORS:  # in the config by now
            continue
        module, _, suffix = name.rpartition(".")
        hf_module = modules.get(module, module)
        values = file.read(name)
        projection = hf_module.rpartition(".")[2]
        if permuted and projection in heads:
            values = _unpermute(values, heads[projection])
        yield f"{hf_module}.{suffix}", values


def _architecture(file: GGUFFile) -> str:
    name = file.metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise ConfigError(
            f"{file.path}: the GGUF architecture {name!r} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[name]


def _hf_modules(file: GGUFFile) -> dict[str, str]:
    """Hugging Face's name of each module by GGUF's, from the table of the `gguf` package."""
    import gguf

    _architecture(file)
    name = file.metadata["general.architecture"]
    num_layers = file.count("block_count")
    table = gguf.get_tensor_name_map(next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == name), num_layers)
    modules = ["model.embed_tokens", "model.norm", "lm_head"]
    modules += [f"model.layers.{i}.{module}" for i in range(num_layers) for module in _LAYER_MODULES]
    return {gguf_name: module for module in modules if (gguf_name := table.get_name(module))}


def _unpermute(values: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Take each head's rows from pairs side by side to two halves. values: [rows] or [rows, columns]"""
    rows = values.shape[0]
    if rows % (2 * num_heads):  # misshapen: the loader says so, by name
        return values
    pairs = values.reshape(num_heads, rows // num_heads // 2, 2, *values.shape[1:])  # [heads, pairs, 2, ...]
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


def _rope_parameters(file: GGUFFile, head_dim: int) -> dict[str, Any]:
    theta = _shortest(file.get("rope.freq_base", 10000.0))
    scaling = file.get("rope.scaling.type", "none")
    if scaling != "none":
        return {"rope_theta": theta, "rope_type": scaling, "factor": file.get("rope.scaling.factor")}
    if _ROPE_FACTORS not in file.tensors:
        return {"rope_theta": theta, "rope_type": "default"}
    factors = file.read(_ROPE_FACTORS)  # [head_dim / 2]
    factor = float(factors.max())
    if not np.allclose(factors, _llama3_factors(theta, head_dim, factor), rtol=1e-4):
        raise ConfigError(
            f"{file.path}: the factors in {_ROPE_FACTORS} are not those of Llama 3.x, so they are not supported; "
            "use the model's folder in Hugging Face layout"
        )
    return {"rope_theta": theta, "rope_type": "llama3", "factor": factor, **_LLAMA3}


def _llama3_factors(theta: float, head_dim: int, factor: float) -> list[float]:
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
