"""Frequencies of a rotary embedding: the published ways to stretch it to longer contexts, by Hugging Face's names.

Numbers are those of transformers' `modeling_rope_utils`, so that checkpoints mean the same here. Each kind gives the
frequencies, float32 [dim / 2], and a factor for cos and sin.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from kernels.rotary_kinds import REQUIRED

Parameters = Mapping[str, Any]


def rotary_frequencies(
    dim: int, max_positions: int, theta: float, kind: str, parameters: Parameters
) -> tuple[Tensor, float]:
    """dim: elements of a head that turn; max_positions: the longest sequence, which "dynamic" and "longrope" go by.

    Raises `ValueError` for another kind, or a parameter that is missing.
    """
    if kind not in REQUIRED:
        raise ValueError(f"rope type must be one of {', '.join(REQUIRED)}, got {kind!r}")
    if missing := [name for name in REQUIRED[kind] if parameters.get(name) is None]:
        raise ValueError(
            f"rope type {kind} needs the parameters {', '.join(REQUIRED[kind])}; missing: {', '.join(missing)}"
        )
    return _KINDS[kind](dim, max_positions, theta, parameters)


def _plain(dim: int, theta: float) -> Tensor:
    exponent = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    return 1.0 / (theta**exponent)


def _default(dim: int, max_positions: int, theta: float, parameters: Parameters) -> tuple[Tensor, float]:
    return _plain(dim, theta), 1.0


def _linear(dim: int, max_positions: int, theta: float, parameters: Parameters) -> tuple[Tensor, float]:
    """Every frequency divided by `factor` (Chen et al., 2023)."""
    return _plain(dim, theta) / parameters["factor"], 1.0


def _dynamic(dim: int, max_positions: int, theta: float, parameters: Parameters) -> tuple[Tensor, float]:
    """A larger base beyond the trained length (NTK-aware scaling).

    transformers takes each sequence's own length; one table for all goes by the longest there can be, so that cached
    keys stay true.
    """
    trained, factor = parameters["max_position_embeddings"], parameters["factor"]
    growth = factor * max(max_positions, trained) / trained - (factor - 1)
    return _plain(dim, theta * growth ** (dim / (dim - 2))), 1.0


def _llama3(dim: int, max_positions: int, theta: float, parameters: Parameters) -> tuple[Tensor, float]:
    """Keep high frequencies, divide low ones by `factor`, and blend in between."""
    factor, low, high, trained = (parameters[name] for name in REQUIRED["llama3"])
    frequencies = _plain(dim, theta)
    wavelength = 2 * math.pi / frequencies
    stretched = torch.where(wavelength > trained / low, frequencies / factor, frequencies)
    smooth = (trained / wavelength - low) / (high - low)
    blended = (1 - smooth) * stretched / factor + smooth * stretched
    between = (wavelength >= trained / high) & (wavelength <= trained / low)
    return torch.where(between, blended, stretched), 1.0


def _yarn(dim: int, max_positions: int, theta: float, parameters: Parameters) -> tuple[Tensor, float]:
    """Divide by `factor` what turns seldom within the trained length, keep what turns often (Peng et al., 2023)."""
    factor, trained = parameters["factor"], parameters["original_max_position_embeddings"]

    def dimension(turns: float) -> float:
        """Where the frequency is that turns so often within the trained length."""
        return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(parameters.get("beta_fast") or 32), dimension(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / ((high - low) or 0.001)
    kept = 1.0 - ramp.clamp(0.0, 1.0)
    powers = theta ** (torch.arange(0, dim, 2).float() / dim)
    return 1.0 / (factor * powers) * (1.0 - kept) + 1.0 / powers * kept, _yarn_factor(factor, parameters)


def _yarn_factor(factor: float, parameters: Parameters) -> float:
    given = parameters.get("attention_factor")
    if given is not None:
        return float(given)
    all_dims, scale = parameters.get("mscale_all_dim"), parameters.get("mscale")
    if scale and all_dims:
        return _warmth(factor, scale) / _warmth(factor, all_dims)
    return _warmth(factor, 1.0)


def _warmth(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope(dim: int, max_positions: int, theta: float, parameters: Parameters) -> tuple[Tensor, float]:
    """A divisor for each frequency, one list for short contexts and one for long (Ding et al., 2024).

    transformers chooses by each sequence's own length; one table for all goes by the longest there can be, so that
    cached keys stay true.
    """
    trained, factor = parameters["original_max_position_embeddings"], parameters["factor"]
    divisors = torch.tensor(parameters["long_factor" if max_positions > trained else "short_factor"])
    if len(divisors) != dim // 2:
        raise ValueError(f"rope type longrope needs {dim // 2} numbers in each of its lists, got {len(divisors)}")
    scale = parameters.get("attention_factor")
    if scale is None:
        scale = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    exponent = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    return 1.0 / (divisors.float() * theta**exponent), float(scale)


_KINDS: dict[str, Callable[[int, int, float, Parameters], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
