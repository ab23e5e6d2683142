"""What ranks tell each other, and what they say when one is lost."""

import os
import signal
import time

import pytest
import torch

from engine.errors import RankLeftError
from engine.parallel.group import ParallelGroup, RankLostError
from tests.ranks import run_ranks

SIZES = (100, 200_000)
"""Elements of a decode step's and of a prompt's tensors."""


def shares(size: int, count: int) -> list[torch.Tensor]:
    return [torch.randn(count, generator=torch.Generator().manual_seed(rank)) for rank in range(size)]


def collectives(group: ParallelGroup) -> dict[str, object]:
    rank, size = group.rank, group.size
    if rank == 1:
        time.sleep(1.2)  # loads longer than a step may take
    smallest = group.min(10 - rank)
    sums = []
    for count in SIZES:
        x = shares(size, count)[rank]
        sums.append(group.all_reduce(x.view(4, -1).clone()))
        # A column of a matrix is no piece of memory of its own.
        sums.append(group.all_reduce(x.view(-1, 4)[:, 1:]))
    nothing = group.all_reduce(torch.empty(0, 4))  # a last layer's output where no token is sampled from
    compiled = group._exchange is not None and group._exchange.adds(x)
    logits = group.gather(torch.full((2, 3), float(rank)), width=3 * size - 1)
    many = group.gather(torch.full((50, 2000), float(rank)), width=2000 * size - 3)
    chosen = group.broadcast(torch.tensor([7 + rank, 8]))
    group.close()
    group.close()
    return {
        "local": group.local_size,
        "compiled": compiled,
        "min": smallest,
        "sums": sums,
        "nothing": nothing.shape,
        "logits": logits,
        "many": many,
        "chosen": chosen,
    }


COMPILED = pytest.mark.parametrize("compiled", [True, False], ids=["C++", "no compiler"])


@COMPILED
@pytest.mark.parametrize("size", [1, 2, 3])
def test_collectives(size: int, compiled: bool) -> None:
    results = run_ranks(size, collectives, timeout_s=1.0, compiled=compiled)
    for result in results:
        assert result["compiled"] == (compiled and size > 1)
        assert result["local"] == size
        assert result["min"] == 10 - (size - 1)
        assert result["nothing"] == (0, 4)
        assert result["chosen"].tolist() == [7, 8]
        # Added in the order of ranks, to the bit, on all of them.
        for i, count in enumerate(SIZES):
            total = sum(shares(size, count)[1:], shares(size, count)[0])
            assert torch.equal(result["sums"][2 * i], total.view(4, -1))
            assert torch.equal(result["sums"][2 * i + 1], total.view(-1, 4)[:, 1:])
    row = [float(rank) for rank in range(size) for _ in range(3)][:-1]
    assert results[0]["logits"].tolist() == [row, row]
    assert all(result["logits"].shape == (0, len(row)) for result in results[1:])
    expected = torch.arange(size).repeat_interleave(2000)[:-3].expand(50, -1)
    assert torch.equal(results[0]["many"], expected.float())


def losses(group: ParallelGroup, how: str) -> list[str]:
    """Rank 0 goes, or stays away too long: what the others call it, and what it is told when it comes late."""
    group.min(0)
    if group.rank == 0:
        if how == "gone":
            group.close()
            return []
        time.sleep(2)
    messages = []
    for _ in range(2):  # what comes late is no answer
        start = time.perf_counter()
        with pytest.raises((RankLeftError, RankLostError)) as raised:
            group.all_reduce(torch.ones(10))
        assert time.perf_counter() - start < 2
        messages.append(f"{raised.type.__name__}: {raised.value}".replace("all_gather", "all_reduce"))
    return messages


@COMPILED
@pytest.mark.parametrize("how", ["gone", "late"])
def test_a_rank_that_is_lost_is_an_error_in_the_others(how: str, compiled: bool) -> None:
    waited = "waited for the others in all_reduce: one"
    left = ": rank {} of 2 " + waited + " has left the group, or its process has ended"
    zero, one = run_ranks(2, losses, how, timeout_s=1.0, compiled=compiled)
    late = f"RankLostError: rank 1 of 2 {waited} did not answer in 1 s"
    again = f"RankLeftError{left.format(1)}"
    assert one == [again if how == "gone" else late, again]
    assert zero == ([] if how == "gone" else [f"RankLeftError{left.format(0)}"] * 2)


def killed(group: ParallelGroup) -> str:
    group.all_reduce(torch.ones(10))
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RankLeftError) as raised:
        group.all_reduce(torch.ones(10))
    return str(raised.value.__cause__)


@COMPILED
def test_a_rank_that_is_killed_is_seen_before_the_time_is_over(compiled: bool) -> None:
    causes = run_ranks(3, killed, timeout_s=60.0, compiled=compiled, killed=1)
    assert any("process of another rank has ended" in cause for cause in causes)


def stopped(group: ParallelGroup) -> str:
    """Rank 1 is stopped, and goes on when rank 0 has given it up."""
    pid = int(group.all_reduce(torch.tensor([float(os.getpid() * group.rank)])))
    if group.rank == 1:
        os.kill(pid, signal.SIGSTOP)
    else:
        time.sleep(0.2)
    with pytest.raises((RankLeftError, RankLostError)) as raised:
        group.all_reduce(torch.ones(10))
    if group.rank == 0:
        os.kill(pid, signal.SIGCONT)
        time.sleep(1)  # still there when the other one looks
    return str(raised.value)


@COMPILED
def test_a_rank_that_is_stopped_is_given_up_when_the_time_is_over(compiled: bool) -> None:
    zero, one = run_ranks(2, stopped, timeout_s=1.0, compiled=compiled)
    assert "did not answer in 1 s" in zero
    assert "did not answer in 1 s" in one or "has left the group" in one
