"""Writes a tiny Hugging Face folder as a GGUF file, as llama.cpp's converter does."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

from engine.model_config import load_model_config
from tests import tiny_models


def write_gguf(
    folder: Path,
    file: Path,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    *,
    pre: str = "gpt-2",
    add_bos: bool | None = False,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, npt.NDArray[Any]] | None = None,
) -> Path:
    """Convert `folder` to `file` and return it; matrices get the type `kind`, vectors stay float32.

    pre: the rule for splitting text, in GGUF's words. add_bos: None leaves the flag out.
    metadata: further numbers and strings. tensors: further tensors by their GGUF names.
    """
    config = load_model_config(folder)
    name = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}[config.architecture]
    writer = gguf.GGUFWriter(file, name)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.layers[0].rope.theta)
    if name == "llama":
        writer.add_rope_dimension_count(config.head_dim)
    else:
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    _add_tokenizer(writer, pre)
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    for key, value in (metadata or {}).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_uint32(key, value)
    names = gguf.get_tensor_name_map(next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == name), config.num_layers)
    for hf_name, weight in load_file(folder / "model.safetensors").items():
        values = weight
        if name == "llama" and ("q_proj" in hf_name or "k_proj" in hf_name):
            values = permute(weight, config.num_heads if "q_proj" in hf_name else config.num_kv_heads)
        own = kind if weight.ndim == 2 else gguf.GGMLQuantizationType.F32
        gguf_name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(gguf_name, gguf.quantize(values, own), raw_dtype=own)
    for gguf_name, values in (tensors or {}).items():
        writer.add_tensor(gguf_name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def permute(weight: npt.NDArray[Any], num_heads: int) -> npt.NDArray[Any]:
    """Each head's rows from two halves to pairs side by side, as llama.cpp rotates them. weight: [rows, columns]"""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def _add_tokenizer(writer: gguf.GGUFWriter, pre: str) -> None:
    hf = tiny_models.tokenizer()
    tokens = [hf.convert_ids_to_tokens(i) for i in range(len(hf))]
    control, normal = int(gguf.TokenType.CONTROL), int(gguf.TokenType.NORMAL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([control if token in tiny_models.SPECIAL_TOKENS else normal for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in json.loads(hf.backend_tokenizer.to_str())["model"]["merges"]])
    writer.add_bos_token_id(tiny_models.BOS_ID)
    writer.add_eos_token_id(tiny_models.EOS_ID)
    writer.add_pad_token_id(tiny_models.PAD_ID)
    writer.add_chat_template(tiny_models.CHAT_TEMPLATE)
