"""Rotary position embedding (Su et al., 2021), half-split: dimension i turns with dimension i + head_dim / 2.

`rotary_table` is made once a model; `apply_rotary` runs in every layer. Frequencies are those of transformers'
`modeling_rope_utils`, so checkpoints mean the same here.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kernels import cpu_ops

KINDS = ("default", "llama3")


def rotary_table(
    head_dim: int, max_positions: int, theta: float, kind: str, parameters: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    """-> (cos, sin), each float32 [max_positions, head_dim / 2].

    kind: "default", or "llama3", which stretches the low frequencies by `parameters`' `factor`,
    `low_freq_factor`, `high_freq_factor` and `original_max_position_embeddings` (Hugging Face's names).

    Raises `ValueError` for an odd head_dim, another kind, or a parameter that is missing.
    """
    if head_dim % 2:
        raise ValueError(f"rotary embedding needs an even head_dim, got {head_dim}")
    if kind not in KINDS:
        raise ValueError(f"rope type must be one of {', '.join(KINDS)}, got {kind!r}")
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (theta**exponent)  # [head_dim / 2]
    if kind == "llama3":
        frequencies = _llama3(frequencies, parameters)
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


def _llama3(frequencies: Tensor, parameters: Mapping[str, Any]) -> Tensor:
    """Keep high frequencies, divide low ones by `factor`, and blend in between."""
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    missing = [name for name in names if name not in parameters]
    if missing:
        raise ValueError(f"rope type llama3 needs the parameters {', '.join(names)}; missing: {', '.join(missing)}")
    factor, low, high, trained = (parameters[name] for name in names)
    wavelength = 2 * math.pi / frequencies
    stretched = torch.where(wavelength > trained / low, frequencies / factor, frequencies)
    smooth = (trained / wavelength - low) / (high - low)
    blended = (1 - smooth) * stretched / factor + smooth * stretched
    between = (wavelength >= trained / high) & (wavelength <= trained / low)
    return torch.where(between, blended, stretched)


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """q: [tokens, heads, head_dim], k: [tokens, kv_heads, head_dim], cos and sin from `rotary_table`,
    positions: int64 [tokens], each below max_positions -> (q, k) turned, of their own types."""
    if cpu_ops.usable(q):
        return cpu_ops.apply_rotary(q, k, cos, sin, positions)
    return reference(q, k, cos, sin, positions)


def reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)  # [tokens, 1, head_dim / 2]
    return _turn(q, cos, sin), _turn(k, cos, sin)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.to(torch.float32).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
