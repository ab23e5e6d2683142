"""Weights as whole numbers with a scale for each GROUP of them along k, laid out for the C++ kernels.

Used for weights that are rounded to 8 bits on purpose (`quantization="int8"`), and for weights that were whole numbers
before: a GGUF file of Q4_0, Q4_1, Q5_0 or Q8_0 holds codes and scales, and float32 values made of them are codes and
scales still, at a fraction of the memory traffic. Those are found by trying, and kept only where every value comes out
as it was.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import cpu_ops, huge_pages

PANEL = 48
"""Output columns of a panel; `kPanel` in the C++ kernels."""

GROUP = 32
"""Weights along k that share a scale; `kGroup` in the C++ kernels."""

MAX_WEIGHT = 127 * 65504.0
"""Largest magnitude that `quantize_weight` can round: the scale is a float16."""

_SLICE = 16
"""Panels that are made at a time: of a whole output matrix several copies would be held meanwhile."""

_FEW = 8


class UnfitWeightError(ValueError):
    """A weight has a NaN, an infinity, or a number above what its packed form holds."""


@dataclass(frozen=True, slots=True)
class Rest:
    """offset + 8 * scale of each group, in 8 bits: a weight is about scale * (code - 8) + that, which is small.

    So the offsets' part of a product is one of whole numbers too, of the sums of groups of activations.
    data: uint8 [panels, bytes]: codes [k / GROUP / 4 rounded up, PANEL, 4], 128 added, then float16 scales [PANEL].
    """

    data: Tensor

    def codes(self) -> Tensor:
        """float32 [panels, PANEL, k / GROUP rounded up to 4]."""
        codes: Tensor = self.data[:, : -2 * PANEL].unflatten(1, (-1, PANEL, 4)).transpose(1, 2).flatten(2)
        return codes.float() - 128.0

    def scale(self) -> Tensor:
        """float16 [panels, PANEL]."""
        return self.data[:, -2 * PANEL :].contiguous().view(torch.float16)


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A [n, k] weight as codes in panels of PANEL output columns, padded: columns to panels, k to groups.

    offset is None: a weight is scale * code, codes from -128 to 127;
        data: uint8 [panels, k / 4, PANEL, 4], 128 added.
    else: a weight is scale * code + offset, codes from 0 to 15;
        data: uint8 [panels, k / 8, PANEL, 4], of each eight the first four in the low halves.
    scale, offset: float16 [panels, k / GROUP, PANEL].
    rest: what `quantized_linear` takes in place of an offset, as made by `quantize_weight`.
    gated: rows are a gate projection, then an up projection, as in SwiGLU; their panels alternate, and the layer
        gives SiLU(gate) * up, n / 2 columns.
    """

    data: Tensor
    scale: Tensor
    offset: Tensor | None
    n: int
    k: int
    gated: bool
    rest: Rest | None = None

    def codes(self) -> Tensor:
        """float32 [panels, PANEL, k / GROUP, GROUP]."""
        data = self.data.transpose(1, 2)  # [panels, PANEL, k / 4 or k / 8, 4]
        if self.offset is not None:
            data = torch.stack((data & 15, data >> 4), dim=-2)
        codes = data.reshape(*self.scale.shape[::2], -1, GROUP).float()
        return codes if self.offset is not None else codes - 128.0

    def rows(self, index: Tensor) -> Tensor:
        """index: int64 [m], each below n -> float32 [m, k], those rows as their codes stand for them; not for gated."""
        if cpu_ops.load():
            return cpu_ops.coded_rows(index, self.data, self.scale, self.offset, self.n, self.k)
        return self.unpack()[index]

    def unpack(self) -> Tensor:
        """The weight as its codes stand for it: float32 [n, k]; not for gated."""
        values = self.codes() * self.scale.transpose(1, 2)[..., None].float()
        if self.offset is not None:
            values += self.offset.transpose(1, 2)[..., None].float()
        return values.flatten(2).flatten(0, 1)[: self.n, : self.k]


def quantize_weight(*parts: Tensor, gated: bool = False) -> QuantizedWeight:
    """parts: [rows, k] on a CPU, one under the other -> codes: their own if `exact_codes` finds some, else rounded to
    8 bits.

    gated: see `QuantizedWeight`; the parts are then gate and up, or one of an even number of rows for both.
    Raises `UnfitWeightError` for what is not finite, or above `MAX_WEIGHT`.
    """
    if found := exact_codes(*parts, gated=gated):
        return found if found.offset is None else replace(found, rest=_rest(found.scale, found.offset))
    made = _empty(parts, gated, offset=False)
    if not _fill(made, parts, _rounded):
        raise UnfitWeightError("it has numbers that cannot be rounded to int8")
    return made


def exact_codes(*parts: Tensor, gated: bool = False) -> QuantizedWeight | None:
    """As `quantize_weight`, but codes that stand for exactly these values; None if there are none among the formats."""
    if parts[0].shape[1] % GROUP:
        return None
    few = parts[0][:_FEW, : _FEW * GROUP].float().unflatten(1, (-1, GROUP))
    for make in (_four_bits, _eight_bits):
        # Most weights have no codes, which a few numbers show.
        if make(few) is None:
            continue
        made = _empty(parts, gated, offset=make is _four_bits)
        if _fill(made, parts, make):
            return made
    return None


def _rest(scale: Tensor, offset: Tensor) -> Rest:
    codes, step, _ = _rounded((offset.float() + 8 * scale.float()).transpose(1, 2))  # [panels, PANEL, k / GROUP]
    fours = (F.pad(codes, (0, -codes.shape[2] % 4)) + 128).to(torch.uint8).unflatten(2, (-1, 4)).transpose(1, 2)
    both = torch.cat((fours.flatten(1), step.contiguous().view(torch.uint8)), dim=1)
    return Rest(huge_pages.empty(both.shape, torch.uint8).copy_(both))


_Codes = tuple[Tensor, Tensor, Tensor | None]


def _rounded(groups: Tensor) -> _Codes:
    scale = (groups.abs().amax(-1) / 127.0).half()
    inverse = torch.where(scale > 0, 1.0 / scale.float(), 0.0)
    return (groups * inverse[..., None]).round_().clamp_(-127, 127), scale, None


def _four_bits(groups: Tensor) -> _Codes | None:
    """Q4_1 counts from the lowest value, Q4_0 from the one of greatest magnitude, which is its code 0."""
    low, high = groups.amin(-1), groups.amax(-1)
    extreme = torch.where(high > -low, high, low)
    return _fit(groups, [((high - low) / 15, low), (extreme / -8, extreme)], 0, 15)


def _eight_bits(groups: Tensor) -> _Codes | None:
    """Q8_0 gives 127 to the greatest magnitude, Q5_0 gives it 16."""
    extreme = groups.abs().amax(-1)
    found = _fit(groups, [(extreme / steps, torch.zeros_like(extreme)) for steps in (127, 16)], -128, 127)
    return None if found is None else (found[0], found[1], None)


def _fit(
    groups: Tensor, candidates: Sequence[tuple[Tensor, Tensor]], lowest: int, highest: int
) -> tuple[Tensor, Tensor, Tensor] | None:
    """groups: [..., GROUP]; candidates: scales and offsets [...] -> (codes, scale, offset), or None if some group is
    exact with no candidate."""
    found: tuple[Tensor, Tensor, Tensor] | None = None
    missing = torch.ones(groups.shape[:-1], dtype=torch.bool)
    for scale, offset in candidates:
        scale, offset = scale.half(), offset.half()
        step, start = scale.float()[..., None], offset.float()[..., None]
        codes = ((groups - start) * torch.where(step != 0, 1.0 / step, 0.0)).round_().clamp_(lowest, highest)
        # The product is exact: 11 bits times 8.
        exact = (codes * step + start == groups).all(-1)
        if found is None:
            found = codes, scale, offset
        else:
            better = exact & missing
            found = (
                torch.where(better[..., None], codes, found[0]),
                torch.where(better, scale, found[1]),
                torch.where(better, offset, found[2]),
            )
        missing &= ~exact
        if not missing.any():
            return found
    return None


def halves_of(parts: Sequence[Tensor]) -> Sequence[Tensor]:
    """Gate and up of a gated weight's parts."""
    return parts[0].chunk(2) if len(parts) == 1 else parts


def _slices(parts: Sequence[Tensor], gated: bool) -> Iterator[tuple[int, Tensor]]:
    """Yield (panel, float32 groups [panels, PANEL, k / GROUP, GROUP] from there on), padded with zeros."""
    columns = [[half] for half in halves_of(parts)] if gated else [parts]
    k = parts[0].shape[1]
    for first in range(0, -(-sum(map(len, columns[0])) // PANEL), _SLICE):
        rows = (_rows_of(column, first * PANEL, (first + _SLICE) * PANEL) for column in columns)
        padded = [F.pad(part, (0, -k % GROUP, 0, -len(part) % PANEL)).unflatten(0, (-1, PANEL)) for part in rows]
        together = torch.stack(padded, dim=1).flatten(0, 1)  # [panels, PANEL, k]
        yield first * len(columns), together.unflatten(2, (-1, GROUP))


def _rows_of(parts: Sequence[Tensor], first: int, end: int) -> Tensor:
    """Rows of the parts taken as one: float32 [end - first or fewer, k]."""
    taken, start = [], 0
    for part in parts:
        taken.append(part[max(first - start, 0) : max(end - start, 0)].float())
        start += len(part)
    return torch.cat(taken)


def _empty(parts: Sequence[Tensor], gated: bool, offset: bool) -> QuantizedWeight:
    n, k, copies = sum(map(len, parts)), parts[0].shape[1], 1 + gated
    panels, groups = copies * -(-n // copies // PANEL), -(-k // GROUP)
    data = huge_pages.empty((panels, groups * GROUP // (8 if offset else 4), PANEL, 4), torch.uint8)
    scale = huge_pages.empty((panels, groups, PANEL), torch.float16)
    start = huge_pages.empty((panels, groups, PANEL), torch.float16) if offset else None
    return QuantizedWeight(data, scale, start, n, k, gated)


def _fill(weight: QuantizedWeight, parts: Sequence[Tensor], make: Callable[[Tensor], _Codes | None]) -> bool:
    """Write the codes that `make` finds of float32 [..., GROUP]; False as soon as it finds none for some group, or none
    with a finite scale."""
    if not cpu_ops.load():
        for panel, groups in _slices(parts, weight.gated):
            found = make(groups)
            if found is None or not found[1].isfinite().all():
                return False
            _put(weight, panel, *found)
        return True
    _clear_padding(weight)
    exact, row = make is not _rounded, 0
    for i, part in enumerate(halves_of(parts) if weight.gated else parts):
        if weight.gated:
            row = 0
        for rows in part.split(_SLICE * PANEL):
            narrow = (rows if rows.dtype is torch.bfloat16 else rows.float()).contiguous()
            place = (row, 1 + weight.gated, i * weight.gated)
            if not cpu_ops.code_rows(narrow, weight.data, weight.scale, weight.offset, *place, exact):
                return False
            row += len(rows)
    return True


def _put(weight: QuantizedWeight, first: int, codes: Tensor, scale: Tensor, offset: Tensor | None) -> None:
    """codes: float32 [panels, PANEL, k / GROUP, GROUP]; scale, offset: float16 [panels, PANEL, k / GROUP]."""
    panels = slice(first, first + len(codes))
    if offset is None or weight.offset is None:
        data = (codes + 128).to(torch.uint8).flatten(2).unflatten(2, (-1, 4))
    else:
        halves = codes.to(torch.uint8).flatten(2).unflatten(2, (-1, 2, 4))  # [panels, PANEL, k / 8, 2, 4]
        data = halves[..., 0, :] | halves[..., 1, :] << 4
        weight.offset[panels] = offset.transpose(1, 2)
    weight.data[panels] = data.transpose(1, 2)
    weight.scale[panels] = scale.transpose(1, 2)


def _clear_padding(weight: QuantizedWeight) -> None:
    """Zero in the columns that stand for no row."""
    copies = 1 + weight.gated
    if used := weight.n // copies % PANEL:
        weight.data[-copies:, :, used:] = 128 if weight.offset is None else 0
        weight.scale[-copies:, :, used:] = 0
        if weight.offset is not None:
            weight.offset[-copies:, :, used:] = 0
