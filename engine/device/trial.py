"""Steps run at the start: the largest, to measure the memory and time they take, and one of each kind, to warm up."""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch

from engine.device.memory import GpuMemory
from engine.runner import RunnerInfo
from engine.step import (
    NO_UPDATES,
    Extras,
    NewBias,
    NewPenalties,
    PromptScores,
    RowParams,
    SamplingMode,
    StepAdapters,
    StepPlan,
    StepResult,
)

WARM_UP_TOKENS = (1, 2, 64)
"""Of a sequence: a decode, a few tokens and a prompt, for which attention has kernels of their own."""

WARM_UP_LENGTHS = (1, 256, 512, 1024, 2048, 4096)
"""Tokens from which the keys of one sequence are split into more parts."""


class _Steps(Protocol):
    def launch(self, plan: StepPlan) -> Any: ...

    def collect(self, ticket: Any) -> StepResult: ...


def trial_plan(info: RunnerInfo, num_tokens: int) -> StepPlan:
    """`num_tokens` on as many sequences as can run, all of them sampled with filters.

    It reads the cache's first block alone and writes nothing, so a cache of one block serves it.
    """
    num_seqs = min(info.max_num_seqs, num_tokens)
    counts = np.full(num_seqs, num_tokens // num_seqs, dtype=np.int32)
    counts[: num_tokens % num_seqs] += 1
    counts = np.minimum(counts, info.max_model_len)
    query_start = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    total = int(query_start[-1])
    rows = np.arange(num_seqs, dtype=np.int32)
    return StepPlan(
        rows=rows,
        query_start=query_start,
        seq_lens=counts,
        token_ids=np.zeros(total, dtype=np.int32),
        positions=np.arange(total, dtype=np.int32) - np.repeat(query_start[:-1], counts),
        slots=np.full(total, -1, dtype=np.int64),
        sample=rows,
        mode=SamplingMode.FULL,
        block_updates=NO_UPDATES,
        new_rows=RowParams(
            rows=rows,
            temperature=np.ones(num_seqs, dtype=np.float32),
            top_p=np.full(num_seqs, 0.9, dtype=np.float32),
            min_p=np.zeros(num_seqs, dtype=np.float32),
            top_k=np.full(num_seqs, 50, dtype=np.int32),
            seed=np.arange(num_seqs, dtype=np.int64),
        ),
    )


def with_adapters(plan: StepPlan) -> StepPlan:
    """The plan with the first slot's adapter for all."""
    return replace(plan, adapters=StepAdapters(np.zeros_like(plan.rows)))


def warm_up_plans(info: RunnerInfo) -> Iterator[StepPlan]:
    """Small steps that take each way through attention and sampling once. They write no KV."""
    for num_tokens in WARM_UP_TOKENS:
        if num_tokens > min(info.max_num_batched_tokens, info.max_model_len):
            continue
        plan = trial_plan(replace(info, max_num_seqs=1), num_tokens)
        for mode in SamplingMode:
            yield replace(plan, mode=mode)
        for length in WARM_UP_LENGTHS:
            if num_tokens < length <= info.max_model_len:
                yield replace(plan, seq_lens=plan.seq_lens + (length - num_tokens),
                              positions=plan.positions + (length - num_tokens))  # fmt: skip
    if info.max_loras:
        yield with_adapters(trial_plan(info, min(64, info.max_num_batched_tokens)))
    num_seqs = min(2, info.max_num_seqs, info.max_num_batched_tokens)
    plan = trial_plan(replace(info, max_num_seqs=num_seqs), num_seqs)
    first, none = np.zeros(1, dtype=np.int32), np.empty(0, dtype=np.int32)
    for masked in {1, num_seqs}:  # some of the rows, and all
        masks = np.full((masked, -(-info.vocab_size // 32)), -1, dtype=np.int32)
        yield replace(plan, extras=Extras(masked=(np.arange(masked, dtype=np.int32), masks)))
    for num_top in range(3):  # none, one and several are kernels of their own
        scores = PromptScores(at=first, targets=first, num_top=num_top, sequences=first, counts=first + 1)
        yield replace(plan, extras=Extras(logprobs=first, num_top=num_top, prompt_scores=scores))
    changes = Extras(
        new_biases=[NewBias(0, first, np.zeros(1, dtype=np.float32), 0.0)],
        new_penalties=[NewPenalties(0, 0.5, 0.5, 1.1, prompt_ids=first, output_ids=none)],
        biased=(first, first),
        penalised=(first, first),
    )
    yield replace(plan, extras=changes, forbidden=(first, first))


def seconds_per_token(runner: _Steps, info: RunnerInfo, num_tokens: int) -> float:
    """Of a step of `num_tokens`, which has been run once before."""
    start = time.perf_counter()
    runner.collect(runner.launch(trial_plan(info, num_tokens)))
    return (time.perf_counter() - start) / num_tokens


def measure_memory(runner: _Steps, info: RunnerInfo, device: torch.device, cuda: Any = torch.cuda) -> GpuMemory:
    """Run the largest step and the largest decode step, and see what the allocator came to hold for each.

    Raises `torch.OutOfMemoryError`.
    """
    peaks = []
    for num_tokens in (info.max_num_batched_tokens, min(info.max_num_seqs, info.max_num_batched_tokens)):
        cuda.synchronize(device)
        cuda.empty_cache()
        before = cuda.memory_reserved(device)
        cuda.reset_peak_memory_stats(device)
        plan = trial_plan(info, num_tokens)
        runner.collect(runner.launch(with_adapters(plan) if info.max_loras else plan))
        peaks.append(cuda.max_memory_reserved(device) - before)
    cuda.synchronize(device)
    cuda.empty_cache()
    free, total = cuda.mem_get_info(device)
    return GpuMemory(total=total, free=free, step=max(peaks), decode=peaks[1])
