"""Steps run before there is a KV cache, to measure what memory and time the largest ones take."""

import time
from typing import Any, Protocol

import numpy as np
import torch

from engine.memory import GpuMemory
from engine.runner import RunnerInfo
from engine.step import NO_UPDATES, RowParams, SamplingMode, StepPlan, StepResult


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
        runner.collect(runner.launch(trial_plan(info, num_tokens)))
        peaks.append(cuda.max_memory_reserved(device) - before)
    cuda.synchronize(device)
    cuda.empty_cache()
    free, total = cuda.mem_get_info(device)
    return GpuMemory(total=total, free=free, step=max(peaks), decode=peaks[1])
