"""Chooses tokens from logits, by what the rows of a step need."""

import torch
from torch import Tensor

from engine.step import RowParams, SamplingMode
from kernels.sampler import draw, lowest_kept, uniform


class Sampler:
    """Keeps the sampling parameters of R persistent rows on the device."""

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        def column(dtype: torch.dtype) -> Tensor:
            return torch.zeros(max_num_seqs, dtype=dtype, device=device)

        self.device = device
        self.temperature = column(torch.float32)
        self.top_p = column(torch.float32)
        self.min_p = column(torch.float32)
        self.top_k = column(torch.int32)
        self.seed = column(torch.int64)

    def set_rows(self, new: RowParams) -> None:
        rows = torch.from_numpy(new.rows).to(self.device)
        for name in ("temperature", "top_p", "min_p", "top_k", "seed"):
            getattr(self, name)[rows] = torch.from_numpy(getattr(new, name)).to(self.device)

    def __call__(
        self,
        logits: Tensor,
        rows: Tensor,
        positions: Tensor,
        mode: SamplingMode,
        forbidden: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """logits: float32 [K, vocab], changed in place; rows, positions: [K] of the tokens to come.

        forbidden: (index into K, token id) pairs -> token ids int64 [K].
        """
        if forbidden is not None:
            logits[forbidden] = -torch.inf
        if mode is SamplingMode.GREEDY:
            return logits.argmax(dim=-1)
        temperature = self.temperature[rows]
        greedy = temperature == 0
        best = logits.argmax(dim=-1)
        logits.div_(torch.where(greedy, 1.0, temperature)[:, None])
        if mode is SamplingMode.FULL:
            low = lowest_kept(logits, self.top_k[rows], self.top_p[rows], self.min_p[rows])
            logits.masked_fill_(logits < low, -torch.inf)
        tokens = draw(logits, uniform(self.seed[rows], positions))
        return torch.where(greedy, best, tokens)
