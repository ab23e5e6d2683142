"""A sum over the ranks of one host, by each of its ways in alternation; a part of `benchmarks.tensor_parallel`.

cpp: memory that ranks share, in C++. rings: rings in shared memory, in Python, as where nothing can compile. gloo:
connections. A decode step of one sequence sums as many numbers as the model's hidden state has, sixty times.
"""

import multiprocessing
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from engine.parallel.group import ParallelGroup

NUMBERS = (576, 512 * 576)
"""Of one token and of a prompt of 512, in SmolLM2-135M."""
ROUNDS, SUMS = 4, 150


def measure(ranks: int) -> Iterator[dict[str, Any]]:
    context = multiprocessing.get_context("spawn")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    times = context.SimpleQueue()
    processes = [context.Process(target=_rank, args=(rank, ranks, store.port, times)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for numbers, took in times.get().items():
        row: dict[str, Any] = {"ranks": ranks, "numbers": numbers}
        for way, us in took.items():
            row |= {f"{way}_us_p50": round(np.percentile(us, 50), 1), f"{way}_us_p99": round(np.percentile(us, 99), 1)}
        yield row
    for process in processes:
        process.join()


def _rank(rank: int, size: int, port: int, times: Any) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False)
    group = ParallelGroup.connect(store, rank, size, torch.device("cpu"), 60.0, "127.0.0.1")
    exchange = group._exchange
    assert exchange is not None
    compiled = exchange._sum
    took: dict[int, dict[str, list[float]]] = {}
    for i in range(ROUNDS):
        for numbers in NUMBERS:
            for way in ("cpp", "rings", "gloo"):
                group._exchange = None if way == "gloo" else exchange
                exchange._sum = compiled if way == "cpp" else None
                us = _sums(group, numbers)
                if i:
                    took.setdefault(numbers, {}).setdefault(way, []).extend(us)
    if rank == 0:
        times.put(took)
    group.min(0)
    group.close()


def _sums(group: ParallelGroup, numbers: int) -> list[float]:
    group.min(0)
    us = []
    for _ in range(SUMS):
        x = torch.ones(numbers)
        began = time.perf_counter()
        group.all_reduce(x)
        us.append(1e6 * (time.perf_counter() - began))
    return us
