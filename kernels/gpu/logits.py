"""Changes to single rows of logits, in place: grammar masks and penalties."""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048


@triton.jit(do_not_specialize=["words"])
def _bitmask_kernel(logits, bitmask, rows, vocab, words, logits_row, BLOCK: tl.constexpr):
    masked = tl.program_id(0).to(tl.int64)
    row = masked
    if rows is not None:
        row = tl.load(rows + masked)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < vocab
    word = tl.load(bitmask + masked * words + at // 32, mask=inside, other=-1)
    barred = ((word >> (at % 32)) & 1) == 0
    tl.store(logits + row * logits_row + at, float("-inf"), mask=inside & barred)


def apply_bitmask(logits: Tensor, bitmask: Tensor, rows: Tensor | None) -> None:
    """As `kernels.bitmask.apply_bitmask`; only barred logits are touched, so a NaN that is barred is -inf."""
    masked, vocab = len(bitmask), logits.shape[1]
    if masked:
        _bitmask_kernel[(masked, triton.cdiv(vocab, _BLOCK))](
            logits, bitmask.contiguous(), rows, vocab, bitmask.shape[1], logits.stride(0), BLOCK=_BLOCK, num_warps=4
        )


@triton.jit
def _penalise_kernel(logits, at_rows, seen, slots, penalties, vocab, logits_row, BLOCK: tl.constexpr):
    row = tl.load(at_rows + tl.program_id(0))
    slot = tl.load(slots + tl.program_id(0))
    presence = tl.load(penalties + slot * 3)
    frequency = tl.load(penalties + slot * 3 + 1)
    repetition = tl.load(penalties + slot * 3 + 2)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < vocab
    times = tl.load(seen + slot * vocab + at, mask=inside, other=0)
    # Tokens that were never there stay as they are, so most logits are neither read nor written.
    found = times > 0
    value = tl.load(logits + row * logits_row + at, mask=found, other=0.0)
    value = tl.where(value > 0, tl.div_rn(value, repetition), value * repetition)
    count = (times >> 1).to(tl.float32)
    value = value - frequency * count - tl.where(count > 0, presence, 0.0)
    tl.store(logits + row * logits_row + at, value, mask=found)


def penalise_rows(logits: Tensor, at: Tensor, seen: Tensor, slots: Tensor, penalties: Tensor) -> None:
    """As `kernels.sampler.penalise_rows`."""
    vocab = logits.shape[1]
    if len(at):
        _penalise_kernel[(len(at), triton.cdiv(vocab, _BLOCK))](
            logits, at, seen, slots, penalties, vocab, logits.stride(0), BLOCK=_BLOCK, num_warps=4
        )
