"""A stand-in for `torch.cuda` on a CPU: streams and events that only log, and graphs that really replay.

A graph records the operators that ran while it was captured and runs them again on the very same tensors. So a value
that came from anywhere but a static buffer is as stale in a replay as it would be on a GPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Call = tuple[Any, tuple[Any, ...], dict[str, Any], Any]

_LOOKS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "_unique2", "bincount")
"""Operators whose result's value or shape the host must wait for."""


class FakeEvent:
    def __init__(self, cuda: "FakeCuda") -> None:
        self._cuda = cuda
        self.passed = cuda.events_pass

    def record(self, stream: Any = None) -> None:
        self._cuda.log.append("record")

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self._cuda.log.append("event.synchronize")


class FakeStream:
    def __init__(self, cuda: "FakeCuda", name: str) -> None:
        self._cuda = cuda
        self.name = name

    def wait_stream(self, other: "FakeStream") -> None:
        self._cuda.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: FakeEvent) -> None:
        self._cuda.log.append(f"{self.name} waits for an event")


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, result))
        return result


class FakeGraph:
    def __init__(self, cuda: "FakeCuda") -> None:
        self._cuda = cuda
        self.calls: list[Call] = []

    def replay(self) -> None:
        assert self.calls, "replayed, but never captured or freed"
        self._cuda.log.append("replay")
        for func, args, kwargs, before in self.calls:
            after = func(*args, **kwargs)
            for old, new in zip(_tensors(before), _tensors(after), strict=True):
                if old.data_ptr() != new.data_ptr():  # neither a view nor written in place
                    old.copy_(new)

    def reset(self) -> None:
        self._cuda.log.append("reset")
        self.calls = []


class FakeCuda:
    """log: what was asked of it, in order. events_pass: whether an event made now will say that it has passed."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.events_pass = True
        self._streams = ["compute"]
        self._made = 0

    def Event(self, **_: Any) -> FakeEvent:
        return FakeEvent(self)

    def Stream(self) -> FakeStream:
        self._made += 1
        return FakeStream(self, f"stream {self._made}")

    def current_stream(self) -> FakeStream:
        return FakeStream(self, self._streams[-1])

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self._streams.append(stream.name)
        yield
        self._streams.pop()

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def empty_cache(self) -> None:
        pass

    def cudart(self) -> "FakeCuda":
        return self

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert address
        assert size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.log.append("unpinned")
        return 0

    def graph_pool_handle(self) -> str:
        return "pool"

    def CUDAGraph(self) -> FakeGraph:
        return FakeGraph(self)

    @contextmanager
    def graph(self, graph: FakeGraph, pool: Any, stream: FakeStream) -> Iterator[None]:
        assert pool == "pool"
        self.log.append("capture")
        with self.stream(stream), no_look_at_the_device(), Recorder() as recorder:
            yield
        graph.calls = recorder.calls


class _Refuse(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        by_mask = name.startswith("index") and any(
            isinstance(i, Tensor) and i.dtype is torch.bool for i in (args[1] if isinstance(args[1], list) else ())
        )
        if name in _LOOKS or by_mask:
            raise AssertionError(f"{func} makes the host wait for the device")
        return func(*args, **(kwargs or {}))


@contextmanager
def no_look_at_the_device() -> Iterator[None]:
    """Fail when the host asks for a tensor's value, as it must not while the device is still busy."""

    def refuse(self: Tensor, *_: Any, **__: Any) -> Any:
        raise AssertionError("the host looks at a tensor's value")

    with mock.patch.multiple(Tensor, item=refuse, tolist=refuse, cpu=refuse, numpy=refuse, __bool__=refuse), _Refuse():
        yield


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for part in value for tensor in _tensors(part)] if isinstance(value, tuple | list) else []
