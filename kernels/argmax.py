"""The largest number of each row, by its place: greedy sampling. The first of equals, and a NaN before all else."""

from torch import Tensor

from kernels import cpu_ops


def argmax(x: Tensor) -> Tensor:
    """x: [rows, n] -> int64 [rows]."""
    if cpu_ops.usable(x) and x.stride(1) == 1:
        return cpu_ops.argmax(x)
    return reference(x)


def reference(x: Tensor) -> Tensor:
    return x.argmax(dim=-1)
