"""What a checkpoint's names and numbers mean to our parameters: prefixes, other names, extra tensors, norm offsets."""

import re
from collections.abc import Iterable, Iterator

from engine.layers.target import Source
from engine.model_config import ModelConfig
from engine.models.families import FAMILIES

_TEXT_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
"""Where a model of several parts keeps its text part, and where a model of text alone does."""

_OTHER_PARTS = re.compile(r"(model\.)?(vision_tower|vision_model|visual|multi_modal_projector|audio_tower)\.")

_REDUNDANT = (".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached", ".attn.bias", ".masked_bias")
"""Old checkpoints store what follows from the config: rotary frequencies, causal masks."""


def translate(weights: Iterable[tuple[str, Source]], config: ModelConfig) -> Iterator[tuple[str, Source]]:
    """Checkpoint tensors under the names of `Decoder.targets`, with their numbers; leaves out what is not needed.

    A name that means nothing stays as it is.
    """
    for stored_name, tensor in weights:
        name = canonical_name(stored_name, config)
        if name is None or name.endswith(_REDUNDANT) or (config.tie_word_embeddings and name == "lm_head.weight"):
            continue
        if config.norm_offset and name.endswith("norm.weight") and tensor.dtype.is_floating_point:
            tensor = tensor[...].float() + 1.0
        yield name, tensor


def canonical_name(name: str, config: ModelConfig) -> str | None:
    """A checkpoint's name as `Decoder.targets` has it; None for one of a part that is not text."""
    for prefix, ours in _TEXT_PREFIXES:
        if name.startswith(prefix):
            name = ours + name.removeprefix(prefix)
            break
    else:
        if _OTHER_PARTS.match(name):
            return None
    for theirs, ours in FAMILIES[config.architecture].renames.items():
        name = name.replace(theirs, ours)
    return name
