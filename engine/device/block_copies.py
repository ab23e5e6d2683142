"""KV blocks between the cache and host memory, on a stream of their own.

The host memory holds, for each tensor of the cache, whole blocks as bytes, so no layout need be known. On a GPU it is
pinned where it lies. The copy stream waits for what has been launched, since that may still use the blocks, and what is
launched next waits for the copies; the host waits for neither.
"""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.device.pinned import Upload
from engine.errors import ConfigError
from engine.layers.attention import KVCache
from engine.step import BlockCopies, Ints
from kernels.zeros import lazy_zeros


class HostBlocks:
    """num_blocks blocks on the host for those of `caches`. cuda: None where the device is the host.

    Raises `ConfigError` when the system does not give so much memory, or does not let it be pinned.
    """

    def __init__(self, caches: Sequence[KVCache], num_blocks: int, upload: Upload, cuda: Any) -> None:
        self._cuda = cuda
        self._upload = upload
        self._stream = None if cuda is None else cuda.Stream()
        device = [cache.flatten(1).view(torch.uint8) for layer in caches for cache in layer]  # [blocks, bytes] each
        num_bytes = num_blocks * sum(part.shape[1] for part in device)
        try:
            self._memory = lazy_zeros((num_bytes,), torch.uint8, "cpu")
        except (OSError, RuntimeError, OverflowError) as cause:
            raise ConfigError(f"swap_space of {num_bytes / 2**30:.1f} GiB cannot be allocated: lower it") from cause
        if cuda is not None:
            error = cuda.cudart().cudaHostRegister(self._memory.data_ptr(), self._memory.nbytes, 0)
            if int(error) != 0:
                raise ConfigError(
                    f"swap_space of {self._memory.nbytes / 2**30:.1f} GiB cannot be pinned ({error}): lower it, or "
                    "raise the limit on locked memory"
                )
        widths = [num_blocks * part.shape[1] for part in device]
        host = [part.view(num_blocks, -1) for part in self._memory.split(widths)]
        self._parts = list(zip(device, host, strict=True))

    def copy(self, copies: BlockCopies) -> None:
        """Queue the copies: first those out, then those in."""
        if self._stream is not None:
            self._stream.wait_stream(self._cuda.current_stream())
        with nullcontext() if self._stream is None else self._cuda.stream(self._stream):
            for blocks, host_blocks in _runs(copies.out_blocks, copies.out_host):
                index = self._upload(blocks)
                for device, host in self._parts:
                    host[host_blocks].copy_(device.index_select(0, index), non_blocking=True)
            for blocks, host_blocks in _runs(copies.in_blocks, copies.in_host):
                index = self._upload(blocks)
                for device, host in self._parts:
                    device.index_copy_(0, index, host[host_blocks].to(device.device, non_blocking=True))
        if self._stream is not None:
            self._cuda.current_stream().wait_stream(self._stream)

    def seconds_per_block(self, num_blocks: int) -> float:
        """Time to copy the cache's first block, in or out, measured on `num_blocks` of host memory."""
        none, first = np.empty(0, dtype=np.int32), np.zeros(num_blocks, dtype=np.int32)
        at = np.arange(num_blocks, dtype=np.int32)
        best = float("inf")
        for _ in range(3):
            start = time.perf_counter()
            self.copy(BlockCopies(out_blocks=first, out_host=at, in_blocks=none, in_host=none))
            if self._cuda is not None:
                self._cuda.synchronize()
            best = min(best, time.perf_counter() - start)
        return best / num_blocks

    def close(self) -> None:
        if self._cuda is not None and self._parts:
            self._cuda.synchronize()
            self._cuda.cudart().cudaHostUnregister(self._memory.data_ptr())
        self._parts = []


def _runs(blocks: Ints, host_blocks: Ints) -> list[tuple[np.ndarray[Any, np.dtype[np.int64]], slice]]:
    """The pairs in pieces whose host blocks are neighbours, in order."""
    if not len(blocks):
        return []
    ends = [*(np.flatnonzero(np.diff(host_blocks) != 1) + 1).tolist(), len(blocks)]
    starts = [0, *ends[:-1]]
    return [
        (blocks[start:end].astype(np.int64), slice(int(host_blocks[start]), int(host_blocks[start]) + end - start))
        for start, end in zip(starts, ends, strict=True)
    ]


def block_bytes(caches: Sequence[KVCache]) -> int:
    """Bytes of one block in all layers."""
    return sum(_row_bytes(cache) for layer in caches for cache in layer)


def _row_bytes(cache: Tensor) -> int:
    return cache[0].numel() * cache.element_size()
