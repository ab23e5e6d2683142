"""Zeroed memory that costs nothing until it is touched."""

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor


def lazy_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """`torch.zeros`, but on a CPU the pages come from the system when they are first written.

    torch writes its zeros: seconds for a KV cache of gigabytes, most of which a small load never touches.
    """
    size = math.prod(shape) * dtype.itemsize
    if torch.device(device).type != "cpu" or size == 0:
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, size), dtype=dtype).view(tuple(shape))
