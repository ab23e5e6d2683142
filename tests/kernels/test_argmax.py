"""argmax against torch's, which takes the first of equals and a NaN before all else."""

import pytest
import torch

from kernels.argmax import argmax, reference


@pytest.mark.parametrize("n", [1, 3, 16, 17, 200, 49152])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_argmax_equals_torch(isa, rows, n):
    x = torch.randn(rows, n)
    assert torch.equal(argmax(x), reference(x))


def test_the_first_of_equals(isa):
    x = torch.zeros(40, 100)
    for row in range(40):
        x[row, [row, 60, 99]] = 2.0
    assert argmax(x).tolist() == list(range(40))
    assert argmax(torch.full((2, 50), -torch.inf)).tolist() == [0, 0]


def test_a_nan_counts_as_the_largest(isa):
    x = torch.randn(3, 100)
    x[0, 70], x[0, 90] = torch.nan, torch.nan
    x[1, 99], x[1, 0] = torch.nan, torch.inf
    assert argmax(x).tolist()[:2] == [70, 99]
    assert torch.equal(argmax(x), reference(x))


def test_a_slice_of_wider_rows(isa):
    x = torch.randn(4, 120)
    assert torch.equal(argmax(x[:, 7:90]), reference(x[:, 7:90]))
