"""Memory that a step frees stays with the process, for the next step to take again.

By default glibc gives it back to the system when twice the largest block so far is free at the end of the heap, as
happens with the results of a prompt's layers, and much of a step's memory comes in as new pages, which the system
zeroes one by one.
"""

import ctypes

_KEPT = 128 << 20
"""Bytes that may lie free at the end of the heap."""

_LARGE = 32 << 20
"""A block above this, the most that glibc takes here, is mapped by itself and given back at once."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h


def keep_freed_memory() -> None:
    """For the whole process, from now on; what is free by now goes back. Without glibc it does nothing."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return
    libc.malloc_trim(ctypes.c_size_t(0))
    libc.mallopt(_MMAP_THRESHOLD, _LARGE)
    libc.mallopt(_TRIM_THRESHOLD, _KEPT)
