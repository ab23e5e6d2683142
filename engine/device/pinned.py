"""Small arrays between host and device, in copies that the host does not wait for.

A copy is asynchronous only from or to pinned memory, and that memory must stay as it is until the copy has been made.
So pinned buffers go round: one is taken again when the event behind its last copy has passed. If none has, another is
made; the host never waits here. `cuda` is `torch.cuda`, or a stand-in for it.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK_BYTES = 1 << 20
"""Of one pinned buffer for uploads: several steps' arrays."""

_ALIGN = 64

T = TypeVar("T")
Upload = Callable[[NDArray[np.generic]], Tensor]
"""Brings an array to the device. The array must not change before the step has been collected."""


def pinned_empty(num_bytes: int) -> Tensor:
    """uint8 [num_bytes] of host memory that a GPU can copy from and to by itself; plain where there is no GPU."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())


class Ring(Generic[T]):
    """Host buffers in turn. `take` gives one whose copies have been made; `sent` says that its copies are queued."""

    def __init__(self, make: Callable[[], T], cuda: Any) -> None:
        self._make = make
        self._cuda = cuda
        self._sent: deque[tuple[T, Any]] = deque()

    def take(self) -> T:
        if self._sent and self._sent[0][1].query():
            return self._sent.popleft()[0]
        return self._make()

    def sent(self, buffer: T) -> None:
        """To be called in the stream that copies from `buffer`, behind the last copy."""
        event = self._cuda.Event()
        event.record()
        self._sent.append((buffer, event))


class PinnedUpload:
    """An `Upload` through pinned buffers that many arrays share."""

    def __init__(self, device: torch.device, cuda: Any) -> None:
        self.device = device
        self._ring = Ring(self._new_block, cuda)
        self._block = self._ring.take()
        self._used = 0

    @staticmethod
    def _new_block() -> tuple[Tensor, NDArray[np.uint8]]:
        block = pinned_empty(BLOCK_BYTES)
        return block, block.numpy()

    def __call__(self, array: NDArray[np.generic]) -> Tensor:
        array = np.ascontiguousarray(array)
        size = array.nbytes
        if size == 0:
            return torch.from_numpy(array).to(self.device, non_blocking=True)
        if size > BLOCK_BYTES:  # torch keeps the memory it pins here until the copy has been made
            whole = torch.from_numpy(array)
            return (whole.pin_memory() if torch.cuda.is_available() else whole).to(
                self.device, non_blocking=True, copy=True
            )
        if self._used + size > BLOCK_BYTES:
            self._ring.sent(self._block)
            self._block, self._used = self._ring.take(), 0
        block, view = self._block
        start, self._used = self._used, self._used + -(-size // _ALIGN) * _ALIGN
        view[start : start + size] = array.reshape(-1).view(np.uint8)
        staged = block[start : start + size].view(torch.from_numpy(array).dtype).view(array.shape)
        return staged.to(self.device, non_blocking=True, copy=True)


@dataclass(frozen=True, slots=True)
class Fetched:
    """Results on their way to the host. sources: held until they have been copied; buffers: what holds the copies."""

    sources: Sequence[Tensor]
    copies: Sequence[Tensor]
    buffers: Sequence[Tensor]
    event: Any


class Results(Protocol):
    """How a step's results come to the host."""

    def start(self, tensors: Sequence[Tensor]) -> Any:
        """Queue copies of `tensors`; returns what `finish` takes."""

    def finish(self, started: Any) -> list[NDArray[Any]]:
        """Wait for the copies of one `start`."""

    def before_overwrite(self) -> None:
        """What was given to `start` is about to be written again, by the device."""


class HostResults:
    """What `Download` is where the device is the host: results are there when the step has been launched."""

    def start(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return tensors

    def finish(self, started: Sequence[Tensor]) -> list[NDArray[Any]]:
        return [tensor.numpy() for tensor in started]

    def before_overwrite(self) -> None:
        pass


class Download:
    """Results to the host on a stream of their own, so that the next step's work need not wait for the copy."""

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda
        self._stream = cuda.Stream()
        self._last: Any = None
        self._free: dict[int, list[Tensor]] = {}  # pinned buffers by size

    def start(self, tensors: Sequence[Tensor]) -> Fetched:
        """Queue copies of `tensors`, which are what the current stream has been told to compute."""
        stream = self._stream
        stream.wait_stream(self._cuda.current_stream())
        buffers = [self._buffer(tensor.nbytes) for tensor in tensors]
        with self._cuda.stream(stream):
            copies = [
                buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
                for buffer, tensor in zip(buffers, tensors, strict=True)
            ]
            event = self._cuda.Event()
            event.record()
        self._last = event
        return Fetched(tensors, copies, buffers, event)

    def finish(self, fetched: Fetched) -> list[NDArray[Any]]:
        """Wait for the copies; the arrays are the caller's own."""
        fetched.event.synchronize()
        arrays = [copy.numpy().copy() for copy in fetched.copies]
        for buffer in fetched.buffers:
            self._free.setdefault(buffer.nbytes, []).append(buffer)
        return arrays

    def before_overwrite(self) -> None:
        """Let the current stream wait for the copies that are queued: what they read is about to be written again."""
        if self._last is not None:
            self._cuda.current_stream().wait_event(self._last)

    def _buffer(self, num_bytes: int) -> Tensor:
        size = 1 << math.ceil(math.log2(max(num_bytes, 1024)))
        free = self._free.get(size)
        return free.pop() if free else pinned_empty(size)
