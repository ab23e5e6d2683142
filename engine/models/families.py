"""The families of models that can be served, each by what sets it apart from Llama: one table, read by everything.

`engine.hf.config` makes a `ModelConfig` of a checkpoint's config by it, `engine.models.checkpoint` reads the weights,
`engine.gguf.config` translates GGUF files, and docs/models.md is printed from it. docs/adding-a-model.md says how a
family is added.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.model_config import NormPlacement, QKNorm


@dataclass(frozen=True, slots=True)
class Family:
    """title: what people call it. model_type: as in config.json; a text part beside others (pictures, sound) has this
        alone. gguf: llama.cpp's name of the architecture; None: GGUF files of it are read as another family, or not.
    gguf_permuted: GGUF files have the rows of q and k interleaved, for a rotation of neighbours.

    defaults: keys of the config that this family knows beside those that all have, and what a missing key means.
    qkv_bias, output_bias: biases of the projections; None: as the config's `attention_bias` says, or, for the output,
        `attention_out_bias` where the family knows it.
    windows: which layers see a window only: those that `layer_types` names, by default all but every `full_every`-th;
        or all, if `sliding_window` is set.
    layer_rope: full and windowed layers turn by parameters of their own.
    renames: parts of parameter names of the checkpoint, and ours.
    """

    title: str
    model_type: str
    gguf: str | None = None
    gguf_permuted: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    norms: NormPlacement = "before"
    norm_offset: bool = False
    qk_norm: QKNorm = "none"
    qkv_bias: bool | None = None
    output_bias: bool | None = None
    windows: Literal["none", "all", "by layer"] = "none"
    full_every: int = 1
    layer_rope: bool = False
    partial_rotary: bool = False
    scaled_embeddings: bool = False
    fused_projections: bool = False
    renames: Mapping[str, str] = field(default_factory=dict)


_GEMMA = {
    "vocab_size": 256_000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192,
    "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "query_pre_attn_scalar": 256,
    "sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
}  # fmt: skip

_QWEN_WINDOW = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(
        "Llama 2, 3, 3.1, 3.2, 3.3; SmolLM 1 and 2; TinyLlama", "llama", gguf="llama", gguf_permuted=True
    ),
    "MistralForCausalLM": Family(
        "Mistral 7B, Nemo, Small",
        "mistral",
        windows="all",
        qkv_bias=False,
        output_bias=False,
        defaults={"sliding_window": 4096, "num_key_value_heads": 8},
    ),
    "MinistralForCausalLM": Family(
        "Ministral 8B",
        "ministral",
        windows="by layer",
        qkv_bias=False,
        output_bias=False,
        defaults={"sliding_window": 4096, "num_key_value_heads": 8},
    ),
    "Qwen2ForCausalLM": Family(
        "Qwen 2, 2.5",
        "qwen2",
        gguf="qwen2",
        windows="by layer",
        qkv_bias=True,
        output_bias=False,
        defaults=_QWEN_WINDOW,
    ),
    "Qwen3ForCausalLM": Family(
        "Qwen 3", "qwen3", gguf="qwen3", windows="by layer", qk_norm="head", defaults={"head_dim": 128, **_QWEN_WINDOW}
    ),
    "Qwen3MoeForCausalLM": Family(
        "Qwen 3 MoE",
        "qwen3_moe",
        gguf="qwen3moe",
        windows="all",
        qk_norm="head",
        defaults={
            "use_sliding_window": False,
            "sliding_window": 4096,
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
    ),
    "MixtralForCausalLM": Family(
        "Mixtral 8x7B, 8x22B",
        "mixtral",
        gguf_permuted=True,
        windows="all",
        qkv_bias=False,
        output_bias=False,
        defaults={
            "sliding_window": None,
            "rope_theta": 1e6,
            "rms_norm_eps": 1e-5,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        },
        renames={
            "block_sparse_moe.": "mlp.",
            ".w1.": ".gate_proj.",
            ".w3.": ".up_proj.",
            ".w2.": ".down_proj.",
        },
    ),
    "SmolLM3ForCausalLM": Family(
        "SmolLM3",
        "smollm3",
        gguf="smollm3",
        gguf_permuted=True,
        windows="by layer",
        defaults={
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "sliding_window": None,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
            "num_key_value_heads": 4,
        },
    ),
    "GraniteForCausalLM": Family(
        "Granite 3.x dense",
        "granite",
        gguf="granite",
        gguf_permuted=True,
        defaults={
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 1.0,
            "logits_scaling": 1.0,
        },
    ),
    "Olmo2ForCausalLM": Family(
        "OLMo 2", "olmo2", gguf="olmo2", norms="after", qk_norm="all_heads", defaults={"rms_norm_eps": 1e-5}
    ),
    "Olmo3ForCausalLM": Family(
        "OLMo 3",
        "olmo3",
        norms="after",
        qk_norm="all_heads",
        windows="by layer",
        full_every=4,
        layer_rope=True,
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "sliding_window": 4096},
    ),
    "Phi3ForCausalLM": Family(
        "Phi-3, Phi-3.5-mini, Phi-4, Phi-4-mini",
        "phi3",
        gguf="phi3",
        windows="all",
        qkv_bias=False,
        output_bias=False,
        partial_rotary=True,
        fused_projections=True,
        defaults={"sliding_window": None, "rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    ),
    "Gemma2ForCausalLM": Family(
        "Gemma 2",
        "gemma2",
        gguf="gemma2",
        norms="around",
        norm_offset=True,
        scaled_embeddings=True,
        windows="by layer",
        full_every=2,
        defaults=_GEMMA,
    ),
    "Gemma3ForCausalLM": Family(
        "Gemma 3 (text)",
        "gemma3_text",
        gguf="gemma3",
        norms="around",
        norm_offset=True,
        qk_norm="head",
        scaled_embeddings=True,
        windows="by layer",
        full_every=6,
        layer_rope=True,
        defaults=_GEMMA
        | {
            "vocab_size": 262_208,
            "max_position_embeddings": 131_072,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "sliding_window_pattern": 6,
        },
    ),
    "SeedOssForCausalLM": Family(
        "Seed-OSS",
        "seed_oss",
        gguf="seed_oss",
        defaults={
            "head_dim": 128,
            "num_key_value_heads": 8,
            "attention_bias": True,
            "attention_out_bias": False,
        },
    ),
}
"""By the architecture's name in config.json."""
