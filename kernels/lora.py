"""Low-rank adapters of a dense layer (LoRA, Hu et al., 2021): y += (x A) B, with the A and B of each token's adapter.

Used by every projection of a model that runs with adapters, in steps where some request has one. Tokens are grouped by
adapter, so that its matrices are read once for all of them (after Punica's SGMV, Chen et al., 2023).
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels import cpu_ops, gpu
from kernels.zeros import lazy_zeros

TILE = 16
"""Tokens that are computed together at most; `kLoraTile` in the C++ kernel."""

RANKS = 16
"""Ranks are padded to multiples of this: whole vectors of a CPU, and the narrowest product of tensor cores."""


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """The adapters of one fused layer, each in a slot. R: the largest rank, padded to a multiple of RANKS.

    a: [slots, in_features, parts * R], the projections of the layer side by side. b: [slots, R, sum of parts].
    parts: output features of each projection.
    columns: int32 [blocks, 3], the output in blocks that lie in one projection: its number, first and last + 1 column.
    """

    a: Tensor
    b: Tensor
    parts: tuple[int, ...]
    columns: Tensor

    @property
    def rank(self) -> int:
        return self.b.shape[1]


COLUMNS = 64
"""Of a block, for the Triton kernels."""


def lora_weights(
    slots: int, rank: int, in_features: int, parts: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
) -> LoraWeights:
    """Zeros for `slots` adapters of up to `rank`."""
    rank = -(-rank // RANKS) * RANKS
    shapes = (slots, in_features, len(parts) * rank), (slots, rank, sum(parts))
    a, b = (lazy_zeros(shape, dtype, device) for shape in shapes)
    columns, start = [], 0
    for part, size in enumerate(parts):
        end = start + size
        columns += [(part, first, min(first + COLUMNS, end)) for first in range(start, end, COLUMNS)]
        start = end
    return LoraWeights(a, b, parts, torch.tensor(columns, dtype=torch.int32, device=device))


@dataclass(frozen=True, slots=True)
class LoraTokens:
    """The tokens of a step that have adapters, M of them, those of one adapter side by side.

    tokens: int32 [M], which of the step's they are.
    tiles: int32 [N, 3]: a slot, and from where to where among the M; at most TILE tokens.
    """

    tokens: Tensor
    tiles: Tensor


def lora_tiles(slots: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """slots: int32 [T], the slot of each token's adapter, -1 for none -> `LoraTokens` as arrays."""
    order = np.argsort(slots, kind="stable").astype(np.int32)
    order = order[np.searchsorted(slots[order], 0) :]
    found, first = np.unique(slots[order], return_index=True)
    edges = [*first.tolist(), len(order)]
    tiles = [
        (slot, start, min(start + TILE, end))
        for slot, (begin, end) in zip(found.tolist(), pairwise(edges), strict=True)
        for start in range(begin, end, TILE)
    ]
    return order, np.array(tiles, dtype=np.int32).reshape(-1, 3)


def add_lora(y: Tensor, x: Tensor, weights: LoraWeights, tokens: LoraTokens) -> None:
    """Add to y what the tokens' adapters make of x. x: [tokens, in_features], y: [tokens, sum of parts], in place."""
    if cpu_ops.usable(y):
        cpu_ops.add_lora(y, x, weights.a, weights.b, weights.parts, tokens.tokens, tokens.tiles)
    elif gpu.usable(y):
        from kernels.gpu import lora

        lora.add_lora(y, x, weights, tokens)
    else:
        reference(y, x, weights, tokens)


def reference(y: Tensor, x: Tensor, weights: LoraWeights, tokens: LoraTokens) -> None:
    for slot, begin, end in tokens.tiles.tolist():
        at = tokens.tokens[begin:end].long()
        low = (x[at] @ weights.a[slot]).split(weights.rank, dim=-1)  # a projection each: [tile, R]
        high = weights.b[slot].split(weights.parts, dim=-1)
        y[at] += torch.cat([h @ b for h, b in zip(low, high, strict=True)], dim=-1)
