"""Memory for weights on large pages, where the system has them.

A decode step reads every weight once. On pages of 4 KiB that waits for a page table every 64 cache lines, which costs a
tenth of the step. Linux gives pages of 2 MiB to memory that asks for them, in whole ones, so small weights share them.
"""

import contextlib
import math
import mmap
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

_CHUNK = 64 << 20
"""Bytes that are asked for at a time; what is never written costs nothing."""

_ALIGNMENT = 64

_lock = threading.Lock()
_chunk: mmap.mmap | None = None
_used = 0


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """`torch.empty` on a CPU. Its memory is freed together with that of the tensors made just before and after it."""
    global _chunk, _used
    count = math.prod(shape)
    if count == 0 or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(tuple(shape), dtype=dtype)
    size = -(-count * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    with _lock:
        if _chunk is None or _used + size > len(_chunk):
            _chunk, _used = _mapped(max(size, _CHUNK)), 0
        chunk, offset = _chunk, _used
        _used += size
    return torch.frombuffer(chunk, dtype=dtype, count=count, offset=offset).view(tuple(shape))


def _mapped(size: int) -> mmap.mmap:
    mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without large pages
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped
