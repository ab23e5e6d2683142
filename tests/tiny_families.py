"""A tiny random model of each family, and of each way that a family's config can go, by name."""

from pathlib import Path
from typing import Any

import transformers as hf

from engine.models.families import FAMILIES
from tests import tiny_models

WINDOW = 24
_TRAINED = {"original_max_position_embeddings": 64}
_LISTS = {"short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [2.0 + i for i in range(8)]}


def _rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, biases, tied": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama, linear rope": ("Llama", _rope("linear", factor=4.0)),
    "llama, dynamic rope": ("Llama", _rope("dynamic", factor=2.0)),
    "llama, llama3 rope": (
        "Llama", _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, **_TRAINED),
    ),
    "llama, yarn rope": ("Llama", _rope("yarn", factor=4.0, **_TRAINED)),
    "llama, longrope": ("Llama", _rope("longrope", factor=4.0, **_LISTS, original_max_position_embeddings=1024)),
    "mistral": ("Mistral", {"sliding_window": WINDOW, "head_dim": 32}),
    "mistral, no window": ("Mistral", {"sliding_window": None}),
    "ministral": (
        "Ministral", {"sliding_window": WINDOW, "head_dim": 16, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    "qwen2": ("Qwen2", {}),
    "qwen2, window": ("Qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
        },
    ),
    "qwen3-moe, dense layers": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "mlp_only_layers": [1],
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW}),
    "smollm3": (
        "SmolLM3",
        {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": WINDOW, "no_rope_layer_interval": 2},
    ),
    "granite": (
        "Granite",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.1, "logits_scaling": 0.5},
    ),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", {"num_hidden_layers": 4, "sliding_window": WINDOW, "rope_parameters": None}),
    "olmo3, yarn": (
        "Olmo3",
        {
            "num_hidden_layers": 4,
            "sliding_window": WINDOW,
            "rope_parameters": {
                "full_attention": _rope("yarn", factor=4.0, **_TRAINED)["rope_parameters"],
                "sliding_attention": _rope("default")["rope_parameters"],
            },
        },
    ),
    "phi3": ("Phi3", {"sliding_window": WINDOW}),
    "phi4-mini": (
        "Phi3",
        {
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "original_max_position_embeddings": 1024,
            **_rope("longrope", partial_rotary_factor=0.5, **_LISTS),
        },
    ),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 32,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 9.0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "num_hidden_layers": 4,
            "head_dim": 32,
            "sliding_window": WINDOW,
            "sliding_window_pattern": 3,
            "query_pre_attn_scalar": 20,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "seed-oss": ("SeedOss", {"head_dim": 32}),
    "seed-oss, output bias": ("SeedOss", {"head_dim": 16, "attention_bias": False, "attention_out_bias": True}),
}  # fmt: skip
"""By name: the family, as transformers' classes begin, and fields of its config over the tiny shape."""

SEEDS = {"llama, biases, tied": 1, "llama, llama3 rope": 1, "olmo2": 1, "olmo3, yarn": 1, "phi4-mini": 1}
"""Other seeds than 0, where the model of seed 0 comes to a close call with the test's prompts."""


def write(name: str, folder: Path, **overrides: Any) -> Path:
    """Write the model `name` of `CASES`. overrides: further fields of its config."""
    family, fields = CASES[name]
    config_class = hf.Gemma3TextConfig if family == "Gemma3" else getattr(hf, f"{family}Config")
    config = config_class(**(tiny_models.shape() | fields | overrides))
    architecture = f"{family}ForCausalLM"
    offset = 1.0 if FAMILIES[architecture].norm_offset else 0.0
    kind = getattr(hf, architecture)
    return tiny_models.write(folder, kind, config, seed=SEEDS.get(name, 0), norm_offset=offset)
