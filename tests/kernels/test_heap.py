import ctypes
import resource

import pytest
import torch

from kernels.heap import keep_freed_memory


def layers() -> None:
    for _ in range(4):
        results = [torch.empty(3 << 20, dtype=torch.uint8) for _ in range(5)]
        for result in results:
            result.numpy()[:] = 1


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="only glibc can be told to")
def test_a_step_takes_the_memory_of_the_step_before() -> None:
    keep_freed_memory()
    layers()
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    layers()
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < 100
