"""Rotary position embedding (Su et al., 2021), half-split: dimension i turns with dimension i + rotary_dim / 2.

`rotary_table` is made once a model; `apply_rotary` runs in every layer. A head's dimensions from rotary_dim on, where
there are any, stay as they are.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kernels import cpu_ops
from kernels.rotary_frequencies import rotary_frequencies


def rotary_table(
    rotary_dim: int, max_positions: int, theta: float, kind: str, parameters: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    """-> (cos, sin), each float32 [max_positions, rotary_dim / 2].

    kind, parameters: see `kernels.rotary_frequencies`. Raises `ValueError` for an odd rotary_dim, another kind, or a
    parameter that is missing.
    """
    if rotary_dim % 2:
        raise ValueError(f"rotary embedding needs an even number of dimensions, got {rotary_dim}")
    frequencies, scale = rotary_frequencies(rotary_dim, max_positions, theta, kind, parameters)
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
    return angles.cos() * scale, angles.sin() * scale


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """q: [tokens, heads, head_dim], k: [tokens, kv_heads, head_dim], cos and sin from `rotary_table`,
    positions: int64 [tokens], each below max_positions -> (q, k) turned, of their own types."""
    if cpu_ops.usable(q):
        return cpu_ops.apply_rotary(q, k, cos, sin, positions)
    return reference(q, k, cos, sin, positions)


def reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)  # [tokens, 1, rotary_dim / 2]
    return _turn(q, cos, sin), _turn(k, cos, sin)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    wide = x.to(torch.float32)
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1).to(x.dtype)
