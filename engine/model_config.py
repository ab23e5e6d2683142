"""The shape of a model: what a checkpoint's config says, in one dataclass, whatever file it came from."""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from engine.errors import ConfigError

Activation = Literal["silu", "gelu_tanh"]
NormPlacement = Literal["before", "after", "around"]
QKNorm = Literal["none", "head", "all_heads"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of `partial_rotary_factor` of a head's dimensions; kind, parameters: `kernels.rotary`."""

    theta: float = 10000.0
    kind: str = "default"
    parameters: dict[str, Any] = field(default_factory=dict)
    partial_rotary_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A mixture of experts: `per_token` of `count` MLPs of `intermediate_size` see each token.

    normalize: the chosen experts' weights add up to 1.
    """

    count: int
    per_token: int
    intermediate_size: int
    normalize: bool


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What may differ from layer to layer.

    rope: None where q and k do not turn. window: tokens that a token sees, its own included; 0: all before it.
    sparse: a mixture of experts (`ModelConfig.experts`) in the MLP's place.
    """

    rope: RopeConfig | None = field(default_factory=RopeConfig)
    window: int = 0
    sparse: bool = False


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A Llama-shaped decoder. Sizes are in elements, counts in heads, layers or tokens.

    norms: RMSNorm before attention and MLP (Llama), after them and before the residual add (OLMo 2), or both (Gemma).
    qk_norm: RMSNorm of each head of q and k, or of all heads of a token together, before they turn.
    attention_scale: factor of q k^T; 0 is head_dim ** -0.5.
    attention_soft_cap, logit_soft_cap: cap * tanh(x / cap) over scores and logits; 0 leaves them.
    embedding_scale, residual_scale, logit_scale: factors of the embeddings, of what a block adds to the residual, and
        of the logits.
    norm_offset: a checkpoint's norm weights are 1 less than the factors that they stand for.
    fused_projections: a checkpoint stores q, k and v as one matrix, and gate and up as one.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    layers: tuple[LayerConfig, ...]
    rms_norm_eps: float = 1e-5
    activation: Activation = "silu"
    norms: NormPlacement = "before"
    qk_norm: QKNorm = "none"
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    attention_scale: float = 0.0
    attention_soft_cap: float = 0.0
    logit_soft_cap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    experts: ExpertsConfig | None = None
    norm_offset: bool = False
    fused_projections: bool = False
    tie_word_embeddings: bool = False
    dtype: str = "float32"
    eos_token_ids: tuple[int, ...] = ()

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def max_model_len(self, asked: int | None) -> int:
        """Longest prompt plus output, tokens: as many as are asked for, or as the model has positions for.

        Raises `ConfigError` if it has fewer than are asked for.
        """
        longest = self.max_position_embeddings
        if (asked or 0) > longest:
            raise ConfigError(f"max_model_len is {asked}, but the model has positions for {longest} tokens")
        return asked or longest


def load_model_config(path: Path) -> ModelConfig:
    """Read the shape of the model in a folder (config.json, generation_config.json) or of a `.gguf` file.

    Raises `ConfigError` that names the file and the key.
    """
    from engine.hf.config import from_hf

    path = Path(path)
    if is_gguf(path):
        from engine.gguf.config import hf_config

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
            ids += token_ids(read_json(file), str(file))
    return tuple(dict.fromkeys(ids))


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


def token_ids(config: dict[str, Any], source: str) -> list[int]:
    """EOS ids of one config: a number, a list, or none. Raises `ConfigError`."""
    value = config.get("eos_token_id")
    if value is None and isinstance(config.get("text_config"), dict):
        value = config["text_config"].get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise ConfigError(f"{source}: eos_token_id is {value!r}, but must be a token id or a list of them")
    return ids
