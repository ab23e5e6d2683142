"""Translates a GGUF file's tensors into those of a checkpoint in Hugging Face layout: names, and the order of rows.

Source of what is undone here: llama.cpp's converter. It interleaves the rows of q and k for a rotation of neighbours,
stacks the experts of a layer, and adds what Gemma's norms leave out.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from engine.gguf_config import ROPE_FACTORS, hf_architecture
from engine.gguf_file import GGUFFile, open_gguf
from engine.models.families import FAMILIES, Family

Values = npt.NDArray[np.float32]

_LAYER_MODULES = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "self_attn.qkv_proj",
    "self_attn.q_norm", "self_attn.k_norm",
    "mlp.gate", "mlp.experts.gate_proj", "mlp.experts.up_proj", "mlp.experts.down_proj",
)  # fmt: skip

_DENSE_MODULES = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_FUSED_MODULES = ("mlp.gate_up_proj", "mlp.down_proj")


def iter_tensors(path: Path) -> Iterator[tuple[str, Values]]:
    """Yield (Hugging Face parameter name, float32 array) of each tensor; one without such a name keeps its own.

    Raises `ConfigError` naming the file.
    """
    file = open_gguf(path)
    family = FAMILIES[hf_architecture(file)]
    modules = _hf_modules(file, family)
    num_heads = file.count("attention.head_count")
    heads = {"q_proj": num_heads, "k_proj": file.get("attention.head_count_kv", num_heads)}
    for name in file.tensors:
        if name in ROPE_FACTORS:  # in the config by now
            continue
        module, _, suffix = name.rpartition(".")
        hf_module = modules.get(module, module)
        values = file.read(name)
        projection = hf_module.rpartition(".")[2]
        if family.gguf_permuted and projection in heads:
            values = _unpermute(values, heads[projection])
        if family.norm_offset and hf_module.endswith("norm"):
            values = values - np.float32(1.0)
        for hf_name, part in _unstacked(f"{hf_module}.{suffix}", values):
            for theirs, ours in family.renames.items():
                hf_name = hf_name.replace(ours, theirs)
            yield hf_name, part


def _hf_modules(file: GGUFFile, family: Family) -> dict[str, str]:
    """Hugging Face's name of each module by GGUF's, from the table of the `gguf` package."""
    import gguf

    name = file.metadata["general.architecture"]
    num_layers = file.count("block_count")
    table = gguf.get_tensor_name_map(next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == name), num_layers)
    modules = ["model.embed_tokens", "model.norm", "lm_head"]
    layer = _LAYER_MODULES + (_FUSED_MODULES if family.fused_projections else _DENSE_MODULES)
    modules += [f"model.layers.{i}.{module}" for i in range(num_layers) for module in layer]
    return {gguf_name: module for module in modules if (gguf_name := table.get_name(module))}


def _unstacked(name: str, values: Values) -> Iterator[tuple[str, Values]]:
    """The experts of a layer one by one: values: [experts, rows, columns]; anything else as it is."""
    before, stacked, projection = name.partition(".experts.")
    if not stacked or values.ndim != 3:
        yield name, values
        return
    for i, expert in enumerate(values):
        yield f"{before}.experts.{i}.{projection}", expert


def _unpermute(values: Values, num_heads: int) -> Values:
    """Take each head's rows from pairs side by side to two halves. values: [rows] or [rows, columns]"""
    rows = values.shape[0]
    if rows % (2 * num_heads):  # misshapen: the loader says so, by name
        return values
    pairs = values.reshape(num_heads, rows // num_heads // 2, 2, *values.shape[1:])  # [heads, pairs, 2, ...]
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)
