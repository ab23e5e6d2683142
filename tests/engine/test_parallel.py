"""What ranks tell each other over gloo, and what they say when one is lost."""

import time

import pytest
import torch

from engine.parallel import ParallelGroup, RankLostError
from tests.ranks import run_ranks

SIZES = (100, 50_000)
"""Elements of a decode step's and of a prompt's tensors."""


def shares(size: int, count: int) -> list[torch.Tensor]:
    return [torch.randn(count, generator=torch.Generator().manual_seed(rank)) for rank in range(size)]


def collectives(group: ParallelGroup) -> dict[str, object]:
    rank, size = group.rank, group.size
    if rank == 1:
        time.sleep(1.5)  # loads longer than a step may take
    smallest = group.min(10 - rank)
    sums = []
    for count in SIZES:
        x = shares(size, count)[rank]
        sums.append(group.all_reduce(x.view(4, -1).clone()))
        # A column of a matrix is no piece of memory of its own.
        sums.append(group.all_reduce(x.view(-1, 4)[:, 1:]))
    logits = group.gather(torch.full((2, 3), float(rank)), width=3 * size - 1)
    chosen = group.broadcast(torch.tensor([7 + rank, 8]))
    group.close()
    group.close()
    return {"local": group.local_size, "min": smallest, "sums": sums, "logits": logits, "chosen": chosen}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_collectives(size: int) -> None:
    results = run_ranks(size, collectives, timeout_s=1.0)
    for result in results:
        assert result["local"] == size
        assert result["min"] == 10 - (size - 1)
        assert result["chosen"].tolist() == [7, 8]
        # Added in the order of ranks, to the bit, on all of them.
        for i, count in enumerate(SIZES):
            total = sum(shares(size, count)[1:], shares(size, count)[0])
            assert torch.equal(result["sums"][2 * i], total.view(4, -1))
            assert torch.equal(result["sums"][2 * i + 1], total.view(-1, 4)[:, 1:])
    row = [float(rank) for rank in range(size) for _ in range(3)][:-1]
    assert results[0]["logits"].tolist() == [row, row]
    assert all(result["logits"].shape == (0, len(row)) for result in results[1:])


def losses(group: ParallelGroup, how: str) -> list[str]:
    """Rank 0 goes, or stays away too long."""
    group.min(0)
    if group.rank == 0:
        if how == "gone":
            group.close()
            return []
        time.sleep(3)
    messages = []
    for _ in range(2):  # what comes late is no answer
        start = time.perf_counter()
        with pytest.raises(RankLostError) as raised:
            group.all_reduce(torch.ones(10))
        assert time.perf_counter() - start < 2
        messages.append(str(raised.value))
    return messages


@pytest.mark.parametrize("how", ["gone", "late"])
def test_a_rank_that_is_lost_is_an_error_in_the_others(how: str) -> None:
    for rank, messages in enumerate(run_ranks(2, losses, how, timeout_s=1.0)):
        for message in messages:
            assert f"rank {rank} of 2" in message
            assert "1 s" in message
