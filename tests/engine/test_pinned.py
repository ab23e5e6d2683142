"""Pinned buffers go round, but never while a copy may still read or write them."""

import numpy as np
import pytest
import torch

from engine.device.pinned import BLOCK_BYTES, Download, PinnedUpload, Ring
from tests.fake_cuda import FakeCuda

CPU = torch.device("cpu")


def test_a_buffer_is_taken_again_only_when_its_copy_has_been_made() -> None:
    cuda = FakeCuda()
    ring = Ring(lambda: object(), cuda)
    cuda.events_pass = False
    first = ring.take()
    ring.sent(first)
    second = ring.take()
    assert second is not first
    ring.sent(second)
    ring._sent[0][1].passed = True
    assert ring.take() is first
    assert ring.take() not in (first, second), "the second one's copy is still being made"


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.float32])
def test_uploads_hold_what_the_array_held(dtype: type[np.generic]) -> None:
    upload = PinnedUpload(CPU, FakeCuda())
    array = np.arange(24, dtype=dtype).reshape(4, 6)
    sent = [upload(array), upload(array[:, ::2]), upload(array[:0])]
    wanted = [array.copy(), array[:, ::2].copy(), array[:0].copy()]
    array[:] = 0
    for tensor, values in zip(sent, wanted, strict=True):
        assert tensor.dtype == torch.from_numpy(values).dtype
        np.testing.assert_array_equal(tensor.numpy(), values)


def test_uploads_beyond_a_block_begin_another_and_leave_the_old_one_alone() -> None:
    cuda = FakeCuda()
    cuda.events_pass = False
    upload = PinnedUpload(CPU, cuda)
    upload(np.full(BLOCK_BYTES // 8 - 8, 1, dtype=np.int64))
    full = upload._block[1].copy()
    old = upload._block[1]
    upload(np.full(100, 2, dtype=np.int64))
    assert upload._block[1] is not old
    np.testing.assert_array_equal(old, full)
    big = np.arange(BLOCK_BYTES // 8 + 1)
    np.testing.assert_array_equal(upload(big).numpy(), big)


def test_results_are_read_behind_their_event_and_their_buffers_are_used_again() -> None:
    cuda = FakeCuda()
    download = Download(cuda)
    tokens, logprobs = torch.arange(5), torch.randn(5, 3)
    first = download.start([tokens, logprobs])
    second = download.start([tokens + 10])
    assert first.buffers[0] is not second.buffers[0]
    assert "event.synchronize" not in cuda.log
    arrays = download.finish(first)
    assert cuda.log[-1] == "event.synchronize"
    third = download.start([tokens + 20])
    assert any(third.buffers[0] is buffer for buffer in first.buffers)
    np.testing.assert_array_equal(arrays[0], np.arange(5))
    np.testing.assert_array_equal(arrays[1], logprobs.numpy())
    np.testing.assert_array_equal(download.finish(second)[0], np.arange(10, 15))


def test_what_is_being_copied_is_not_written_again_before_that() -> None:
    cuda = FakeCuda()
    download = Download(cuda)
    download.before_overwrite()
    assert cuda.log == []
    download.start([torch.arange(5)])
    download.before_overwrite()
    assert cuda.log[-1] == "compute waits for an event"
