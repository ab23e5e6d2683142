import mmap
from pathlib import Path

import pytest
import torch

from kernels import huge_pages


def test_tensors_share_memory_and_do_not_overlap() -> None:
    made = [
        huge_pages.empty((3, n), dtype) for n in (1, 50, 700) for dtype in (torch.uint8, torch.float16, torch.float32)
    ]
    for i, x in enumerate(made):
        assert x.is_contiguous()
        assert x.data_ptr() % 64 == 0
        x.fill_(i)
    assert all((x == i).all() for i, x in enumerate(made))


def test_more_than_a_chunk_and_nothing_at_all() -> None:
    large = huge_pages.empty((huge_pages._CHUNK + 1,), torch.uint8)
    small = huge_pages.empty((5,), torch.uint8)
    large[-1], small[:] = 1, 2
    assert large[-1] == 1
    assert huge_pages.empty((0, 4), torch.float32).shape == (0, 4)


def test_a_tensor_keeps_its_memory_when_the_others_are_gone() -> None:
    kept = huge_pages.empty((1000,), torch.int64).fill_(7)
    for _ in range(3):
        huge_pages.empty((huge_pages._CHUNK,), torch.uint8)[:] = 0
    assert (kept == 7).all()


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="only Linux has them")
def test_the_system_is_asked_for_large_pages() -> None:
    x = huge_pages.empty((4096,), torch.uint8)
    flags = ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(maxsplit=1)[0]
        if "-" in first:
            begin, end = (int(part, 16) for part in first.split("-"))
        elif first == "VmFlags:" and begin <= x.data_ptr() < end:
            flags = line
    assert " hg" in flags
