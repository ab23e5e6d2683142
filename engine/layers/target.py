"""What a checkpoint tensor fills: a parameter, or rows of one that is laid out once all of its rows have come."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.shares import Span


class Source(Protocol):
    """What a checkpoint has of a tensor: a view of a file, or what is read when it is asked for. A tensor is one."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def __getitem__(self, index: Any, /) -> Tensor:
        """index: a slice for each dimension, or `...`."""


class Target(Protocol):
    """A tensor is one."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def device(self) -> torch.device: ...

    def copy_(self, source: Tensor, /) -> object:
        """source: of this shape and any floating type."""


def fill(target: Target, source: Source) -> None:
    """Hand the target all that it takes of the source, and read nothing else."""
    if isinstance(target, Slices):
        target.take(source)
    else:
        target.copy_(source[...])


class Parts:
    """Gathers a matrix's rows, in as many parts as a checkpoint has them, and hands them over when all are there.

    Until then it keeps what it was given, which for a safetensors file is a view of the file and takes no memory: the
    matrix is made from it in one pass, and no other copy of the model ever exists.
    """

    def __init__(self, rows: list[int], columns: int, finish: Callable[[list[Tensor]], None]) -> None:
        self._finish = finish
        self._sources: list[Tensor | None] = [None] * len(rows)
        self.targets: list[Target] = [_Part(self, i, torch.Size((count, columns))) for i, count in enumerate(rows)]

    def put(self, index: int, source: Tensor) -> None:
        self._sources[index] = source
        sources = [source for source in self._sources if source is not None]
        if len(sources) == len(self._sources):
            self._sources = [None] * len(sources)
            self._finish(sources)


class _Part:
    device = torch.device("cpu")

    def __init__(self, parts: Parts, index: int, shape: torch.Size) -> None:
        self._parts, self._index, self.shape = parts, index, shape

    def copy_(self, source: Tensor, /) -> None:
        """source: must not change until its matrix is complete."""
        assert source.shape == self.shape
        self._parts.put(self._index, source)


class Slices:
    """Takes a tensor of which it hands on some parts, such as those that one rank holds; the rest is not read."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.shape = torch.Size()
        self._parts: list[tuple[Target, tuple[slice, ...]]] = []

    def add(self, target: Target | None, rows: Span, *columns: Span) -> None:
        """The tensor has the whole of `rows` below what it had; target takes the span itself, None nothing of it.

        A target that has more rows than there are gets zeros for the others.
        """
        first = self.shape[0] if self.shape else 0
        self.shape = torch.Size((first + rows.whole, *(span.whole for span in columns)))
        starts = (first + rows.start, *(span.start for span in columns))
        if target is not None:
            index = tuple(slice(start, start + size) for start, size in zip(starts, target.shape, strict=True))
            self._parts.append((target, index))

    def copy_(self, source: Tensor, /) -> None:
        self.take(source)

    def take(self, source: Source) -> None:
        for target, index in self._parts:
            part = source[index]
            if padding := target.shape[0] - part.shape[0]:
                part = F.pad(part, (0, 0) * (part.dim() - 1) + (0, padding))
            target.copy_(part)
