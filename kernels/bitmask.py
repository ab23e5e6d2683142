"""Bars the tokens that a bitmask leaves out: their logits become -inf, in place.

logits: floating [rows, vocab]; bitmask: int32 [masked rows, ceil(vocab / 32)], bit i % 32 of word i // 32 set where
token i is allowed. Used by the sampler for rows under a grammar.

Method: each byte of the mask picks eight limits, +inf or -inf, from a table, and the logits are cut to them. There is
no branch on a bit, which on a CPU is ten times the speed of a masked fill when the mask is mixed.
"""

import functools

import torch
from torch import Tensor

from kernels import gpu


def apply_bitmask(logits: Tensor, bitmask: Tensor, rows: Tensor | None = None) -> None:
    """rows: int64 [masked rows], which rows of `logits` the masks are for; None for all, in order. A NaN of an
    allowed token stays.

    Raises `ValueError` for shapes that do not fit.
    """
    _check(logits, bitmask, rows)
    if gpu.usable(logits):
        from kernels.gpu import logits as gpu_logits

        gpu_logits.apply_bitmask(logits, bitmask, rows)
        return
    table = _limits(logits.dtype, logits.device)
    index = bitmask.contiguous().view(torch.uint8).to(torch.int32)  # [masked rows, bytes]
    limits = torch.nn.functional.embedding(index, table).flatten(1)[:, : logits.shape[1]]
    if rows is None:
        torch.minimum(logits, limits, out=logits)
    else:
        torch.minimum(logits.index_select(0, rows), limits, out=limits)
        logits.index_copy_(0, rows, limits)


def reference(logits: Tensor, bitmask: Tensor, rows: Tensor | None = None) -> None:
    """As `apply_bitmask`."""
    _check(logits, bitmask, rows)
    bits = bitmask[:, :, None] >> torch.arange(32, dtype=torch.int32, device=bitmask.device) & 1
    barred = bits.flatten(1)[:, : logits.shape[1]] == 0  # [masked rows, vocab]
    at = slice(None) if rows is None else rows
    logits[at] = logits[at].masked_fill(barred, -torch.inf)


def _check(logits: Tensor, bitmask: Tensor, rows: Tensor | None) -> None:
    masked = len(logits) if rows is None else len(rows)
    wanted = (masked, -(-logits.shape[1] // 32))
    if bitmask.dtype != torch.int32 or tuple(bitmask.shape) != wanted:
        raise ValueError(f"the bitmask must be int32 {list(wanted)}, got {bitmask.dtype} {list(bitmask.shape)}")


@functools.cache
def _limits(dtype: torch.dtype, device: torch.device) -> Tensor:
    """[256, 8]: for each byte, the highest value that each of its eight tokens may have."""
    bits = torch.arange(256)[:, None] >> torch.arange(8) & 1
    return torch.where(bits == 1, torch.inf, -torch.inf).to(device, dtype)
