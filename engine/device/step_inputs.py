"""A step's plan as tensors on the device, and the rows that stay there between steps."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.device.logit_tables import LogitTables
from engine.device.pinned import Upload
from engine.runner import RunnerInfo
from engine.step import BlockUpdates, Ints, RowParams, StepPlan
from kernels.attention import AttentionMetadata


@dataclass(slots=True)
class PromptScoreInputs:
    """`PromptScores` on the device: at, targets: [M] int64."""

    at: Tensor
    targets: Tensor
    num_top: int


@dataclass(slots=True)
class ExtraInputs:
    """`Extras` on the device: biased, penalised: indices into K and slots, [n] int64 each; logprobs: [n] int64.

    masked: indices into K, [n] int64, and bitmasks of allowed tokens, int32 [n, ceil(vocab / 32)].
    """

    biased: tuple[Tensor, Tensor] | None
    masked: tuple[Tensor, Tensor] | None
    penalised: tuple[Tensor, Tensor] | None
    logprobs: Tensor | None
    num_top: int
    prompt_scores: PromptScoreInputs | None


@dataclass(slots=True)
class SampleInputs:
    """K sequences that sample, by row and position of the token to come: int64 [K] each.

    forbidden: index into K and token id, [F] each.
    extras: what only some rows need; None in a step where none does.
    """

    rows: Tensor
    positions: Tensor
    forbidden: tuple[Tensor, Tensor] | None
    extras: ExtraInputs | None


@dataclass(slots=True)
class StepInputs:
    """What forward and sampling read, of T tokens. token_ids, positions: [T] int64.

    sample_at: [K] int64, which of the T are the last of a sequence that samples.
    """

    token_ids: Tensor
    positions: Tensor
    metadata: AttentionMetadata
    sample_at: Tensor
    sampling: SampleInputs


@dataclass(slots=True)
class _Places:
    """What of a step's inputs stays the same while the same rows decode. arrays: held, so their ids stay theirs."""

    of: tuple[int, int, int]
    arrays: tuple[Ints, Ints, Ints]
    rows: Tensor
    query_start: Tensor
    sample_rows: Tensor
    sample_at: Tensor
    max_query_len: int
    all_sample: bool


class DeviceRows:
    """The device's half of the persistent batch: R rows that a plan changes by differences, and one for padding.

    padding_row: R; what is written to it is never read, and it samples greedily.
    block_tables: int32 [R + 1, max_blocks].
    last_tokens: int64 [R + 1], the token each row sampled last: the next step may start before the host has seen it.
    temperature, top_p, min_p: float32 [R + 1]; top_k: int32 [R + 1]; seed: int64 [R + 1].
    tables: what is as wide as the vocabulary, for rows that need it.
    """

    def __init__(self, info: RunnerInfo, device: torch.device, upload: Upload = torch.from_numpy) -> None:
        self.padding_row = info.max_num_seqs
        rows = info.max_num_seqs + 1
        self.upload = upload
        self.block_tables = torch.zeros(
            rows, -(-info.max_model_len // info.block_size), dtype=torch.int32, device=device
        )
        self.last_tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.temperature = torch.zeros(rows, dtype=torch.float32, device=device)
        self.top_p = torch.ones(rows, dtype=torch.float32, device=device)
        self.min_p = torch.zeros(rows, dtype=torch.float32, device=device)
        self.top_k = torch.zeros(rows, dtype=torch.int32, device=device)
        self.seed = torch.zeros(rows, dtype=torch.int64, device=device)
        self.tables = LogitTables(info.vocab_size, device, upload)
        self._last_places: _Places | None = None

    def inputs(self, plan: StepPlan) -> StepInputs:
        """Apply the plan's differences and make its tensors."""
        self.update_blocks(plan.block_updates)
        if plan.new_rows is not None:
            self.set_params(plan.new_rows)
        where = self._places(plan)
        token_ids = self.upload(plan.token_ids.astype(np.int64))
        if plan.pending is not None:
            rows = self.upload(plan.rows[plan.pending])
            token_ids[self.upload((plan.query_start[1:] - 1)[plan.pending])] = self.last_tokens[rows]
        positions = plan.seq_lens if where.all_sample else plan.seq_lens[plan.sample]
        metadata = AttentionMetadata(
            query_start=where.query_start,
            seq_lens=self.upload(plan.seq_lens),
            block_tables=self.block_tables,
            rows=where.rows,
            slots=self.upload(plan.slots),
            max_query_len=where.max_query_len,
            max_seq_len=int(plan.seq_lens.max()),
        )
        return StepInputs(
            token_ids=token_ids,
            positions=self.upload(plan.positions.astype(np.int64)),
            metadata=metadata,
            sample_at=where.sample_at,
            sampling=SampleInputs(
                rows=where.sample_rows,
                positions=self.upload(positions.astype(np.int64)),
                forbidden=self.forbidden(plan),
                extras=self.extras(plan),
            ),
        )

    def forbidden(self, plan: StepPlan) -> tuple[Tensor, Tensor] | None:
        if plan.forbidden is None:
            return None
        return self.upload(plan.forbidden[0]), self.upload(plan.forbidden[1])

    def update_blocks(self, updates: BlockUpdates) -> None:
        if len(updates.rows):
            self.block_tables[self.upload(updates.rows), self.upload(updates.columns)] = self.upload(updates.blocks)

    def _places(self, plan: StepPlan) -> "_Places":
        """Tensors of which rows and tokens take part; those of the last plan if it had the very same arrays."""
        known = self._last_places
        if known is not None and known.of == (id(plan.rows), id(plan.query_start), id(plan.sample)):
            return known
        # Small index arithmetic is done before the transfer: numpy's calls cost a fraction of torch's.
        sample = plan.sample
        self._last_places = places = _Places(
            of=(id(plan.rows), id(plan.query_start), id(sample)),
            arrays=(plan.rows, plan.query_start, sample),
            rows=self.upload(plan.rows),
            query_start=self.upload(plan.query_start),
            sample_rows=self.upload(plan.rows[sample].astype(np.int64)),
            sample_at=self.upload((plan.query_start[1:] - 1)[sample].astype(np.int64)),
            max_query_len=int((plan.query_start[1:] - plan.query_start[:-1]).max()),
            all_sample=len(sample) == len(plan.rows),
        )
        return places

    def extras(self, plan: StepPlan) -> ExtraInputs | None:
        extras = plan.extras
        if extras is None:
            return None
        for bias in extras.new_biases:
            self.tables.set_bias(bias)
        for penalties in extras.new_penalties:
            self.tables.set_penalties(penalties)
        scores = extras.prompt_scores
        return ExtraInputs(
            biased=None if extras.biased is None else self._index_pair(extras.biased),
            penalised=None if extras.penalised is None else self._index_pair(extras.penalised),
            masked=None
            if extras.masked is None
            else (self.upload(extras.masked[0].astype(np.int64)), self.upload(extras.masked[1])),
            logprobs=None if extras.logprobs is None else self.upload(extras.logprobs.astype(np.int64)),
            num_top=extras.num_top,
            prompt_scores=PromptScoreInputs(
                self.upload(scores.at.astype(np.int64)),
                self.upload(scores.targets.astype(np.int64)),
                scores.num_top,
            )
            if scores is not None and len(scores.at)
            else None,
        )

    def _index_pair(self, pair: tuple[Ints, Ints]) -> tuple[Tensor, Tensor]:
        return self.upload(pair[0].astype(np.int64)), self.upload(pair[1].astype(np.int64))

    def set_params(self, new: RowParams) -> None:
        rows = self.upload(new.rows)
        self.temperature[rows] = self.upload(new.temperature)
        self.top_p[rows] = self.upload(new.top_p)
        self.min_p[rows] = self.upload(new.min_p)
        self.top_k[rows] = self.upload(new.top_k)
        self.seed[rows] = self.upload(new.seed)
