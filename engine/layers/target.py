"""What a checkpoint tensor fills: a parameter, or rows of one that is laid out once all of its rows have come.

Numbers that are not finite are refused: a model with one of them answers nonsense, without an error. Those of a matrix
that is laid out are looked at by what does that.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.parallel.shares import Span
from kernels.quantized_weight import MAX_WEIGHT, UnfitWeightError

_FLOAT32_MAX = torch.finfo(torch.float32).max


class NumbersError(ValueError):
    """Numbers that the model cannot hold; says which, but not of what.

    part: the target whose numbers they are, where that is not the one that is being filled.
    """

    def __init__(self, message: str, part: "Target | None" = None) -> None:
        super().__init__(message)
        self.part = part


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
        """source: of this shape and any floating type. All but a tensor raise `NumbersError`."""


def check_numbers(kept: Tensor, given: Tensor, limit: float, form: str) -> None:
    """Raise `NumbersError` unless `kept`, made of `given` for a form of this name, is within +- limit: one pass."""
    if not kept.numel():
        return
    lowest, highest = torch.aminmax(kept)
    if -limit <= lowest.item() and highest.item() <= limit:
        return
    if odd := int(given.isfinite().logical_not().sum()):
        raise NumbersError(f"{odd} of its {given.numel()} numbers are NaN or infinite")
    raise NumbersError(f"it has numbers up to {given.abs().max().item():.4g}, but {form} holds none above {limit:.4g}")


def check_finite(kept: Tensor, given: Tensor) -> None:
    """Raise `NumbersError` unless `kept`, made of `given`, is finite."""
    check_numbers(kept, given, torch.finfo(kept.dtype).max, str(kept.dtype).removeprefix("torch."))


def fill(target: Target, source: Source) -> None:
    """Hand the target all that it takes of the source, and read nothing else.

    Raises `NumbersError` for what is not finite in the type that it is kept in.
    """
    if isinstance(target, Slices):
        target.take(source)
    elif isinstance(target, Tensor):
        given = source[...]
        target.copy_(given)
        # What has been written lies where it is quick to read, on a GPU above all.
        check_finite(target, given)
    else:
        target.copy_(source[...])


class Parts:
    """Gathers a matrix's rows, in as many parts as a checkpoint has them, and hands them over when all are there.

    Until then it keeps what it was given, which for a safetensors file is a view of the file and takes no memory: the
    matrix is made from it in one pass, and no other copy of the model ever exists.

    finish: raises `UnfitWeightError` or `NumbersError` for numbers that are not finite.
    rounded: whether the matrix is rounded to int8.
    """

    def __init__(
        self,
        rows: list[int],
        columns: int,
        finish: Callable[[list[Tensor]], None],
        *,
        rounded: bool = False,
    ) -> None:
        self._finish = finish
        self._limit, self._form = (MAX_WEIGHT, "int8") if rounded else (_FLOAT32_MAX, "float32")
        self._sources: list[Tensor | None] = [None] * len(rows)
        self.targets: list[Target] = [_Part(self, i, torch.Size((count, columns))) for i, count in enumerate(rows)]

    def put(self, index: int, source: Tensor) -> None:
        self._sources[index] = source
        sources = [source for source in self._sources if source is not None]
        if len(sources) == len(self._sources):
            self._sources = [None] * len(sources)
            try:
                self._finish(sources)
            except UnfitWeightError:
                self._raise_first(sources)
                raise

    def _raise_first(self, sources: list[Tensor]) -> None:
        for target, source in zip(self.targets, sources, strict=True):
            try:
                check_numbers(source, source, self._limit, self._form)
            except NumbersError as error:
                raise NumbersError(str(error), target) from None


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

    def hands_to(self, target: Target) -> bool:
        return any(part is target for part, _ in self._parts)

    def copy_(self, source: Tensor, /) -> None:
        self.take(source)

    def take(self, source: Source) -> None:
        for target, index in self._parts:
            part = source[index]
            if padding := target.shape[0] - part.shape[0]:
                part = F.pad(part, (0, 0) * (part.dim() - 1) + (0, padding))
            fill(target, part)
