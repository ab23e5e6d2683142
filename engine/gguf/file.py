"""Reads GGUF files: the header with its metadata, and tensors dequantised to float32.

Source of the format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The header is parsed here, since
the `gguf` package makes several array objects of each string: over a second for a vocabulary, against a tenth.
What a quantisation means comes from that package, which loads only when tensors are read.
"""

import mmap
import re
import struct
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.errors import ConfigError

Values = npt.NDArray[np.float32]

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)


class GGUFError(ConfigError):
    """The file is no GGUF that can be read; names it."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. shape: outermost dimension first, as in torch; kind: ggml's type; offset, room: bytes, of
    which room is up to the next tensor or the end of the file."""

    path: Path
    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int
    room: int


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """A parsed header; tensors are read from the file when asked for. Of a model in several files, all of them."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]

    def get(self, key: str, default: Any = None) -> Any:
        """A value of the architecture's own section, such as `block_count`."""
        return self.metadata.get(f"{self.metadata.get('general.architecture')}.{key}", default)

    def count(self, key: str) -> int:
        """As `get`, for a whole number of at least 1. Raises `GGUFError` naming the key."""
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise GGUFError(f"{self.path}: {key} is {value!r}, but must be a whole number of at least 1")
        return value

    def read(self, name: str) -> Values:
        """Dequantise one tensor to float32. Raises `GGUFError` naming the tensor."""
        shape = self.tensors[name].shape
        return self.read_part(name, slice(0, prod(shape[:-1])), slice(0, shape[-1])).reshape(shape)

    def read_part(self, name: str, rows: slice, columns: slice) -> Values:
        """Dequantise a part of a tensor, as [rows, columns]: the blocks in which it lies are all that is read.

        rows, columns: with both ends, within the tensor taken as a matrix: its columns are its last dimension, its rows
            all others. Raises `GGUFError` naming the tensor.
        """
        import gguf

        info = self.tensors[name]
        try:
            kind = gguf.GGMLQuantizationType(info.kind)
            block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
            if info.shape[-1] % block:
                raise ValueError(f"rows of {info.shape[-1]} are no whole number of blocks of {block}")
            shape = prod(info.shape[:-1]), info.shape[-1] // block, block_bytes
            missing = info.offset + prod(shape) - info.path.stat().st_size
            if missing > 0:
                raise ValueError(f"{info.path.name} ends {missing} bytes before the tensor does")
            if prod(shape) > info.room:
                raise ValueError(f"it has {prod(shape)} bytes, and another tensor begins after {info.room}")
            num_rows, num_columns = rows.stop - rows.start, columns.stop - columns.start
            if not num_rows or not num_columns:
                return np.empty((num_rows, num_columns), np.float32)
            first, end = columns.start // block, -(-columns.stop // block)
            # raw: [rows, blocks of a row, block_bytes]
            raw = np.asarray(np.memmap(info.path, np.uint8, "r", info.offset, shape))[rows, first:end]
            values = gguf.dequantize(raw.reshape(num_rows, (end - first) * block_bytes), kind)
            start = columns.start - first * block
            part = values[:, start : start + num_columns]
        except (ValueError, KeyError, NotImplementedError) as error:
            raise GGUFError(f"{self.path}: the tensor {name} cannot be read ({error})") from error
        return np.require(part, np.float32, ("C", "W"))  # float32 of the file is still the file's


def open_gguf(path: Path) -> GGUFFile:
    """Parse the header of a GGUF file. Raises `GGUFError` naming the file when it is truncated or corrupt."""
    try:
        parts = _parts(path)
        stats = tuple((part.stat().st_size, part.stat().st_mtime_ns) for part in parts)
        return _open(parts, stats)
    except ConfigError:
        raise
    except OSError as error:
        raise GGUFError(f"{path} cannot be read ({error.strerror})") from error
    except (struct.error, ValueError, OverflowError) as error:
        raise GGUFError(f"{path} is no valid GGUF file: truncated or corrupt ({error})") from error


_PART_NAME = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf")


def _parts(path: Path) -> tuple[Path, ...]:
    """All files of the model that `path` is, or is one of."""
    match = _PART_NAME.fullmatch(path.name)
    if match is None:
        return (path,)
    stem, count = match[1], int(match[2])
    parts = tuple(path.with_name(f"{stem}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1))
    if absent := [part.name for part in parts if not part.is_file()]:
        raise GGUFError(f"{path} is one of {count} files, and of those {', '.join(absent[:5])} are not beside it")
    return parts


@lru_cache(maxsize=2)
def _open(parts: tuple[Path, ...], stats: tuple[tuple[int, int], ...]) -> GGUFFile:
    # Config, weights and tokenizer each ask for the same header; sizes and times in the key notice a new file.
    files = []
    for path in parts:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            files.append(_HeaderParser(path, data).parse())
    first = files[0]  # has the metadata of all
    count = first.metadata.get("split.count", 1)
    if count not in (0, len(parts)):
        raise GGUFError(
            f"{first.path} is one of {count} parts: keep them side by side as NAME-00001-of-{count:05}.gguf and so on"
        )
    return GGUFFile(first.path, first.metadata, {name: info for file in files for name, info in file.tensors.items()})


class _HeaderParser:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.at = 0

    def parse(self) -> GGUFFile:
        if self.data[:4] != b"GGUF":
            raise GGUFError(f"{self.path} is no GGUF file: it does not begin with 'GGUF'")
        self.at = 4
        version = self._scalar("I")
        if version not in _VERSIONS:
            raise GGUFError(f"{self.path}: GGUF version {version} is not supported (2 and 3, little endian, are)")
        num_tensors, num_values = self._scalar("Q"), self._scalar("Q")
        metadata = {}
        for _ in range(num_values):
            key = self._string()
            metadata[key] = self._value(self._scalar("I"))
        return GGUFFile(self.path, metadata, self._tensors(num_tensors, metadata.get("general.alignment", 32)))

    def _tensors(self, count: int, alignment: int) -> dict[str, TensorInfo]:
        found = []
        for _ in range(count):
            name = self._string()
            shape = tuple(reversed(self._scalars("Q", self._scalar("I"))))
            found.append((name, shape, self._scalar("I"), self._scalar("Q")))
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"general.alignment is {alignment!r}")
        start = -(-self.at // alignment) * alignment
        bounds = [*sorted({start + offset for *_, offset in found}), len(self.data)]
        ends = dict(pairwise(bounds))
        tensors = {}
        for name, shape, kind, offset in found:
            first = start + offset
            # A number takes more than a bit of the file in every type.
            if not shape or 0 in shape or prod(shape) > 8 * (len(self.data) - first):
                raise GGUFError(f"{self.path} is truncated or corrupt: the tensor {name} has no place in it")
            tensors[name] = TensorInfo(self.path, name, shape, kind, first, ends[first] - first)
        return tensors

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise ValueError(f"a value of the unknown type {kind}")
        item, count = self._scalar("I"), self._scalar("Q")
        if item in _SCALARS:
            return list(self._scalars(_SCALARS[item], count))
        if item != _STRING:
            raise ValueError(f"an array of the unknown type {item}")
        return [self._string() for _ in range(count)]

    def _scalar(self, code: str) -> Any:
        return self._scalars(code, 1)[0]

    def _scalars(self, code: str, count: int) -> tuple[Any, ...]:
        start = self._advance(struct.calcsize(code) * count)
        return struct.unpack_from(f"<{count}{code}", self.data, start)

    def _string(self) -> str:
        start = self._advance(self._scalar("Q"))
        return self.data[start : self.at].decode("utf-8")

    def _advance(self, size: int) -> int:
        start = self.at
        if start + size > len(self.data):
            raise ValueError("it ends within its header")
        self.at = start + size
        return start
