"""PEFT's `adapter_config.json`: what of it counts here, and what is refused."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from engine.lora.request import AdapterError

CONFIG = "adapter_config.json"

_LARGEST = 1e30
"""Of alphas: what is far too large is told as that, and not as weights that have no end."""

T = TypeVar("T")

_REFUSED: dict[str, tuple[Any, str]] = {
    "use_dora": (False, "DoRA (use_dora)"),
    "bias": ("none", "trained biases (bias)"),
    "lora_bias": (False, "biases of B (lora_bias)"),
    "modules_to_save": (None, "whole modules beside the low-rank ones (modules_to_save)"),
    "trainable_token_indices": (None, "trained token embeddings (trainable_token_indices)"),
    "target_parameters": (None, "parameters of experts (target_parameters)"),
    "layer_replication": (None, "layers used twice (layer_replication)"),
    "alora_invocation_tokens": (None, "activation from a token on (alora_invocation_tokens)"),
    "use_qalora": (False, "QALoRA (use_qalora)"),
    "fan_in_fan_out": (False, "transposed weights (fan_in_fan_out)"),
}
"""Keys, the one value that changes nothing, and what any other asks for."""


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """rank, alpha: of all modules but those that a pattern names: regular expressions of the ends of module names."""

    rank: int
    alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    use_rslora: bool

    @property
    def highest_rank(self) -> int:
        return max([self.rank, *self.rank_pattern.values()])

    def rank_of(self, module: str) -> int:
        return _matching(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """The factor of B A (Hu et al., 2021; with use_rslora, Kalajdzievski, 2023)."""
        rank = self.rank_of(module)
        return _matching(self.alpha_pattern, module, self.alpha) / (math.sqrt(rank) if self.use_rslora else rank)


def parse_config(text: bytes, file: Path) -> PeftConfig:
    """Raises `AdapterError` that names the file, and what in it cannot be served."""
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{file} is no JSON: {error}.") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else None
        raise AdapterError(f"{file}: peft_type is {kind!r}, but only LORA adapters can be served.")
    for key, (harmless, what) in _REFUSED.items():
        if config.get(key) not in (harmless, None, [], {}):
            raise AdapterError(f"{file}: {what} cannot be served; only low-rank matrices of projections can.")
    rank, alpha = config.get("r", 8), config.get("lora_alpha", 8)
    patterns = config.get("rank_pattern") or {}, config.get("alpha_pattern") or {}
    numbers = [(rank, int), (alpha, int | float)]
    for pattern, kinds in zip(patterns, (int, int | float), strict=True):
        if not isinstance(pattern, dict) or not all(_is_pattern(key) for key in pattern):
            raise AdapterError(f"{file}: rank_pattern and alpha_pattern give numbers for names of modules.")
        numbers += [(value, kinds) for value in pattern.values()]
    for value, kinds in numbers:
        if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value <= _LARGEST:
            raise AdapterError(
                f"{file}: ranks are whole numbers above 0, alphas numbers above 0, at most {_LARGEST:g}; it has "
                f"{value!r}."
            )
    return PeftConfig(rank, float(alpha), *patterns, use_rslora=bool(config.get("use_rslora")))


def _is_pattern(key: str) -> bool:
    try:
        re.compile(key)
    except re.error:
        return False
    return True


def _matching(patterns: Mapping[str, T], module: str, otherwise: T) -> T:
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), otherwise)
