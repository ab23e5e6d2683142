"""The kernel benchmark runs on the card and no time is under its floor. Needs a card."""

import pytest
import torch

from benchmarks.kernels_gpu import main

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that torch can use")


def test_kernel_times_are_above_their_floors():
    rows = main(budget_s=60.0)
    assert [row["name"] for row in rows[:2]] == ["ceiling", "ceiling"]
    assert len(rows) > 2
    # The ceilings are measured too: a kernel that reads more than it writes may pass the rate of a copy a little.
    assert all(0 < row["share"] < 1.25 for row in rows[2:])
