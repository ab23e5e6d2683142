"""Writes a tiny Hugging Face folder as a GGUF file, as llama.cpp's converter does."""

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

from tests import tiny_models

ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe", "smollm3": "smollm3", "granite": "granite", "olmo2": "olmo2", "olmo3": "olmo2",
    "phi3": "phi3", "gemma2": "gemma2", "gemma3_text": "gemma3", "seed_oss": "seed_oss",
}  # fmt: skip
"""GGUF's architecture by `model_type`."""

PERMUTED = ("llama", "mistral", "mixtral", "granite", "smollm3")
OFFSET_NORMS = ("gemma2", "gemma3_text")


def write_gguf(
    folder: Path,
    file: Path,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    *,
    pre: str = "gpt-2",
    pieces: list[tuple[str, float, gguf.TokenType]] | None = None,
    add_bos: bool | None = False,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, npt.NDArray[Any]] | None = None,
    files: int = 1,
) -> Path:
    """Convert `folder` to `file` and return it; matrices get the type `kind`, vectors stay float32.

    pre: the rule for splitting text, in GGUF's words. pieces: of a SentencePiece tokenizer, in place of the folder's,
    with BOS, EOS and unknown as the ids 1, 2 and 0. add_bos: None leaves the flag out.
    metadata: further numbers and strings. tensors: further tensors by their GGUF names. files: above 1, `file` is the
    stem of their names, and the first of them is returned.
    """
    config = json.loads((folder / "config.json").read_text())
    model_type = config["model_type"]
    name = ARCHITECTURES[model_type]
    writer = gguf.GGUFWriter(file, name, split_max_tensors=0 if files == 1 else 8)
    _add_config(writer, config, name)
    if pieces is None:
        _add_tokenizer(writer, pre)
    else:
        _add_pieces(writer, pieces)
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    for key, value in (metadata or {}).items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_uint32(key, value)
    arch = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == name)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for hf_name, weight in _stacked(load_file(folder / "model.safetensors")).items():
        values = weight
        if model_type in PERMUTED and ("q_proj" in hf_name or "k_proj" in hf_name):
            heads = "num_attention_heads" if "q_proj" in hf_name else "num_key_value_heads"
            values = permute(weight, config[heads])
        if model_type in OFFSET_NORMS and hf_name.endswith("norm.weight"):
            values = weight + np.float32(1.0)
        own = kind if weight.ndim >= 2 else gguf.GGMLQuantizationType.F32
        gguf_name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(gguf_name, gguf.quantize(values, own), raw_dtype=own)
    for gguf_name, values in (tensors or {}).items():
        writer.add_tensor(gguf_name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if files == 1:
        return file
    return sorted(file.parent.glob(f"{file.stem}-00001-of-*.gguf"))[0]


def _add_config(writer: gguf.GGUFWriter, config: dict[str, Any], name: str) -> None:
    """As llama.cpp's converter does: what it leaves out is left out here."""
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = config["rope_parameters"]
    full = rope.get("full_attention", rope)
    if name != "gemma2":
        writer.add_rope_freq_base(full["rope_theta"])
    if name in ("llama", "phi3", "granite", "smollm3"):
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    else:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if full["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(full["rope_type"]))
        writer.add_rope_scaling_factor(full["factor"])
    if full["rope_type"] in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])
    if full["rope_type"] == "longrope":
        for length in ("long", "short"):
            writer.add_tensor(f"rope_factors_{length}.weight", np.array(full[f"{length}_factor"], np.float32))
    if name in ("gemma2", "gemma3", "phi3") or config["model_type"] == "olmo3":
        writer.add_sliding_window(config.get("sliding_window") or 0)
    if config["model_type"] == "olmo3":
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    if name == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if name == "granite":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if experts := config.get("num_local_experts", config.get("num_experts")):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        if "moe_intermediate_size" in config:
            writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


_MIXTRAL = {"block_sparse_moe.": "mlp.", ".w1.": ".gate_proj.", ".w3.": ".up_proj.", ".w2.": ".down_proj."}


def _stacked(weights: dict[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    """Experts of a layer as one tensor, by Qwen's names."""
    found: dict[str, Any] = {}
    for name, weight in weights.items():
        for theirs, ours in _MIXTRAL.items():
            name = name.replace(theirs, ours)
        match = re.fullmatch(r"(.+\.experts)\.(\d+)\.(.+)", name)
        if match is None:
            found[name] = weight
        else:
            found.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = weight
    return {
        name: np.stack([weight[i] for i in range(len(weight))]) if isinstance(weight, dict) else weight
        for name, weight in found.items()
    }


def permute(weight: npt.NDArray[Any], num_heads: int) -> npt.NDArray[Any]:
    """Each head's rows from two halves to pairs side by side, as llama.cpp rotates them. weight: [rows, columns]"""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def _add_pieces(writer: gguf.GGUFWriter, pieces: list[tuple[str, float, gguf.TokenType]]) -> None:
    tokens, scores, kinds = (list(column) for column in zip(*pieces, strict=True))
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types([int(kind) for kind in kinds])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


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
