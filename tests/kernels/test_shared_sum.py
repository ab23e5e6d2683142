"""Sums over processes through shared memory: the definition's bits, sizes across pieces, ranks that do not come."""

import contextlib
import mmap
import multiprocessing
import struct
import time
from collections.abc import Callable

import pytest
import torch

from kernels.shared_sum import LINE, PIECE, SharedSum, memory_size, reference

SIZES = (1, 3, 576, 0, PIECE, PIECE + 1, 1_000_000)


def term(rank: int, count: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(1000 * rank + count))


def nothing() -> None:
    pass


def run(size: int, function: Callable[[SharedSum, int], None], memory: mmap.mmap | None = None) -> list[int]:
    """The exit codes of processes that each run `function` as a rank."""
    context = multiprocessing.get_context("fork")  # the memory is handed on
    shared = memory or mmap.mmap(-1, memory_size(size))

    def start(rank: int) -> None:
        torch.set_num_threads(1)
        function(SharedSum(shared, rank, size), rank)

    processes = [context.Process(target=start, args=(rank,)) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(100)
        process.kill()
    return [process.exitcode or 0 for process in processes]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_all_ranks_get_the_bits_of_the_definition(size: int) -> None:
    def add_up(total: SharedSum, rank: int) -> None:
        for _ in range(3):
            for count in SIZES:
                expected = reference([term(r, count) for r in range(size)])
                for _ in range(5):
                    assert torch.equal(total(term(rank, count), 60, nothing), expected)

    assert run(size, add_up) == [0] * size


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_first_rank_gathers_what_all_have(size: int) -> None:
    def gather(total: SharedSum, rank: int) -> None:
        for count in (*SIZES, 2, 576):
            found = total.gather(term(rank, count), 60, nothing)
            assert (found is None) == (rank > 0)
            if found is not None:
                assert torch.equal(found, torch.stack([term(r, count) for r in range(size)]))
            # Sums between them take the same memory.
            assert torch.equal(total(term(rank, 5), 60, nothing), reference([term(r, 5) for r in range(size)]))

    assert run(size, gather) == [0] * size


def test_a_rank_that_is_slow_is_waited_for_and_the_caller_looks_around_meanwhile() -> None:
    def add_up(total: SharedSum, rank: int) -> None:
        looks: list[None] = []
        if rank == 1:
            time.sleep(0.5)
        x = total(torch.full((5,), 1.0 + rank), 60, lambda: looks.append(None))
        assert x.tolist() == [3.0] * 5
        assert bool(looks) == (rank == 0)

    assert run(2, add_up) == [0, 0]


def test_numbers_of_pieces_begin_anew() -> None:
    memory = mmap.mmap(-1, memory_size(2))
    start = 2**32 - 3
    for rank in range(2):
        struct.pack_into("<I", memory, rank * LINE, start)

    def add_up(total: SharedSum, rank: int) -> None:
        total._number = start
        for i in range(8):
            assert total(torch.tensor([float(rank + i)]), 60, nothing).tolist() == [2.0 * i + 1]

    assert run(2, add_up, memory) == [0, 0]


def test_a_rank_that_does_not_come_is_an_error_after_the_time_that_was_said() -> None:
    total = SharedSum(mmap.mmap(-1, memory_size(2)), 0, 2)
    x = torch.ones(4)
    start = time.perf_counter()
    with pytest.raises(TimeoutError, match=r"rank 1 did not come for 0.3 s"):
        total(x, 0.3, nothing)
    assert time.perf_counter() - start >= 0.3
    assert x.tolist() == [1.0] * 4


def test_what_the_look_around_raises_ends_the_wait() -> None:
    def look() -> None:
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError, match="gone"):
        SharedSum(mmap.mmap(-1, memory_size(2)), 0, 2)(torch.ones(4), 60, look)


def test_what_a_rank_brought_before_it_gave_up_is_not_taken() -> None:
    memory = mmap.mmap(-1, memory_size(2))
    other = SharedSum(memory, 1, 2)
    bring(other)
    other.give_up()
    with pytest.raises(RuntimeError, match="rank 1 has given up"):
        SharedSum(memory, 0, 2)(torch.ones(4), 60, nothing)


def test_a_rank_that_gathers_nothing_itself_is_done_though_another_has_given_up_since() -> None:
    """The first one may have made its tokens of it, and failed in the step after that."""
    memory = mmap.mmap(-1, memory_size(2))
    first, second = (SharedSum(memory, rank, 2) for rank in range(2))

    def go_on() -> None:  # while the second waits
        found = first.gather(torch.zeros(4), 60, nothing)
        assert found is not None
        assert found.tolist() == [[0.0] * 4, [1.0] * 4]
        first.give_up()

    assert second.gather(torch.ones(4), 60, go_on) is None
    with pytest.raises(RuntimeError, match="rank 0 has given up"):
        second(torch.ones(4), 60, lambda: bring(first))


def bring(total: SharedSum) -> None:
    with contextlib.suppress(RuntimeError, TimeoutError):
        total(torch.ones(4), 0, nothing)


def test_what_is_no_contiguous_float32_is_refused() -> None:
    total = SharedSum(mmap.mmap(-1, memory_size(1)), 0, 1)
    with pytest.raises(TypeError, match="float32"):
        total(torch.ones(4, dtype=torch.float64), 1, nothing)
    with pytest.raises(ValueError, match="contiguous"):
        total(torch.ones(4, 4).t(), 1, nothing)
