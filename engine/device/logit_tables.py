"""What is added to the logits of single requests, and which tokens they had: device rows as wide as the vocabulary.

A table has a row for each request that uses it and none before the first: it grows by doubling. The counts are brought
up to date on the device when a token has been chosen, so a step need not wait for the host to see it.
"""

import numpy as np
import torch
from torch import Tensor

from engine.device.pinned import Upload
from engine.step import NewBias, NewPenalties
from kernels.sampler import penalise_rows


class LogitTables:
    """bias: float32 [slots, vocab].

    seen: int32 [slots, vocab], twice the times that the output has a token, plus one if the prompt has it.
    penalties: float32 [slots, 3]: presence, frequency, repetition.
    """

    def __init__(self, vocab_size: int, device: torch.device, upload: Upload) -> None:
        self._tensor = upload
        self.bias = torch.zeros(0, vocab_size, dtype=torch.float32, device=device)
        self.seen = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self.penalties = torch.zeros(0, 3, dtype=torch.float32, device=device)

    def set_bias(self, new: NewBias) -> None:
        self.bias = _with_row(self.bias, new.slot)
        row = self.bias[new.slot]
        row.fill_(new.others)
        row[self._tensor(new.token_ids.astype(np.int64))] = self._tensor(new.values)

    def set_penalties(self, new: NewPenalties) -> None:
        self.seen = _with_row(self.seen, new.slot)
        self.penalties = _with_row(self.penalties, new.slot)
        values = np.array([new.presence, new.frequency, new.repetition], dtype=np.float32)
        self.penalties[new.slot] = self._tensor(values)
        counts = 2 * np.bincount(new.output_ids, minlength=self.seen.shape[1])
        counts[np.unique(new.prompt_ids)] += 1
        self.seen[new.slot] = self._tensor(counts.astype(np.int32))

    def add_bias(self, logits: Tensor, at: Tensor, slots: Tensor) -> None:
        """logits: float32 [K, vocab], changed in place; at: int64 [n], indices into K of what holds `slots`."""
        logits[at] += self.bias[slots]

    def penalise(self, logits: Tensor, at: Tensor, slots: Tensor) -> None:
        """As `add_bias`."""
        penalise_rows(logits, at, self.seen, slots, self.penalties)

    def count(self, tokens: Tensor, slots: Tensor) -> None:
        """Note the tokens [n] that the holders of `slots` [n] have just said."""
        self.seen[slots, tokens] += 2


def _with_row(table: Tensor, row: int) -> Tensor:
    """The table, or a larger copy of it that has `row`."""
    if row < len(table):
        return table
    larger = table.new_zeros(max(row + 1, 2 * len(table)), table.shape[1])
    larger[: len(table)] = table
    return larger
