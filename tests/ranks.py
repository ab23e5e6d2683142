"""Runs a function in several processes that find each other as the ranks of a `ParallelGroup` do."""

import multiprocessing
import pickle
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from engine.parallel.group import ParallelGroup
from kernels import cpu_ops

_TIMEOUT_S = 120


def run_ranks(
    size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60.0,
    compiled: bool = True,
    killed: int | None = None,
) -> list[Any]:
    """The results of function(group, *args) by rank, all of which pickle takes. timeout_s: of the group's collectives.

    compiled: whether there are C++ kernels. killed: the rank that comes to no result.
    Raises `AssertionError` with the traceback of the first rank that fails.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["engine.runner_setup", "tests.reference", "tests.tiny_families"])
    pipes = [context.Pipe() for _ in range(size)]
    processes = [
        context.Process(target=_run, args=(rank, size, child, timeout_s, compiled, function, args), daemon=True)
        for rank, (_, child) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    for _, child in pipes:
        child.close()
    try:
        port = _received(pipes[0][0])
        for parent, _ in pipes[1:]:
            parent.send(port)
        return [_received(parent) for rank, (parent, _) in enumerate(pipes) if rank != killed]
    finally:
        for process in processes:
            process.join(5)
            process.kill()


def _received(pipe: Connection) -> Any:
    assert pipe.poll(_TIMEOUT_S), "a rank does not answer"
    ok, value = pickle.loads(pipe.recv_bytes())
    assert ok, value
    return value


def _send(pipe: Connection, ok: bool, value: Any) -> None:
    pipe.send_bytes(pickle.dumps((ok, value)))  # `send` would leave tensors in memory that goes with this process


def _run(
    rank: int,
    size: int,
    pipe: Connection,
    timeout_s: float,
    compiled: bool,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    if not compiled:
        cpu_ops.load = lambda: False
    try:
        if rank == 0:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            _send(pipe, True, store.port)
        else:
            store = dist.TCPStore("127.0.0.1", pipe.recv(), is_master=False)
        group = ParallelGroup.connect(store, rank, size, torch.device("cpu"), timeout_s, "127.0.0.1")
        _send(pipe, True, function(group, *args))
    except BaseException:
        _send(pipe, False, f"rank {rank}: {traceback.format_exc()}")
