"""A dense layer, y = x W^T + bias, with weights laid out for a CPU.

Used by every projection and by the output head. torch's own float32 matrix product leaves half the speed of some CPUs
unused and reads weights as float32; the packed form here is read in the order it is used, and is as narrow as it can be
without loss: bfloat16 for a checkpoint stored in that, whole numbers of 8 or 4 bits for one that was quantised (GGUF).
That divides the memory and the traffic of a decode step by 2, 4 or 6. Arithmetic is float32 in every form. A gate and
an up projection may be one weight, whose product does SwiGLU while its sums are in cache, and a residual add and a norm
before a product are done by the threads that need them.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import cpu_ops, huge_pages
from kernels.quantized_weight import PANEL, QuantizedWeight, UnfitWeightError, exact_codes, halves_of

_SLICE = 16 * PANEL
"""Rows that are looked at and converted at a time: of a whole output matrix more copies would be held meanwhile."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A [n, k] weight as panels of PANEL output columns; the last is padded with zeros.

    data: float32 [ceil(n / PANEL), k, PANEL], or bfloat16 [ceil(n / PANEL), k / 2, PANEL, 2], or exact codes.
    gated: rows are a gate projection, then an up projection, of n / 2 each; their panels alternate.
    """

    data: Tensor | QuantizedWeight
    n: int
    k: int
    gated: bool = False

    def unpack(self) -> Tensor:
        """The weight as it was: float32 [n, k]."""
        if isinstance(self.data, QuantizedWeight):
            columns = len(self.data.data) * PANEL
            rows = replace(self.data, n=columns, gated=False).unpack()
        else:
            pairs = self.data if self.data.dim() == 4 else self.data.unsqueeze(-1)
            rows = pairs.transpose(1, 2).reshape(-1, self.k).float()
        if not self.gated:
            return rows[: self.n]
        parts = rows.view(-1, 2, PANEL, self.k).transpose(0, 1).flatten(1, 2)  # [2, columns of a part, k]
        return parts[:, : self.n // 2].flatten(0, 1)


def packs(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether weights of this type on this device have a packed form."""
    return device.type == "cpu" and dtype is torch.float32 and cpu_ops.load()


def pack_weight(*parts: Tensor, gated: bool = False) -> PackedWeight:
    """parts: [rows, k] on a CPU, one under the other, of any floating type -> their packed form, where `packs`.

    gated: see `PackedWeight`; the parts are then gate and up, or one of an even number of rows for both.
    Raises `UnfitWeightError` for what is not finite in float32.
    """
    assert cpu_ops.load()
    columns = [[half] for half in halves_of(parts)] if gated else [parts]
    n, k = sum(map(len, columns[0])), parts[0].shape[1]  # n: of each of the columns
    panels = -(-n // PANEL) * len(columns)
    if k % 2 == 0 and all(_fits_bfloat16(part) for part in parts):
        data = huge_pages.empty((panels, k // 2, PANEL, 2), torch.bfloat16)
    elif codes := exact_codes(*parts, gated=gated):
        return PackedWeight(codes, codes.n, k, gated)
    else:
        data = huge_pages.empty((panels, k, PANEL), torch.float32)
    for i, column in enumerate(columns):
        row = 0
        for part in column:
            for rows in part.split(_SLICE):
                if not cpu_ops.pack_rows(rows.to(data.dtype).contiguous(), data[i :: len(columns)], row):
                    raise UnfitWeightError(f"it has numbers that are not finite in {data.dtype}")
                row += len(rows)
    if used := n % PANEL:
        data[-len(columns) :, :, used:] = 0
    return PackedWeight(data, n * len(columns), k, gated)


def _fits_bfloat16(weight: Tensor) -> bool:
    """Whether all values are bfloat16 numbers; where not, usually the first row shows it."""
    if weight.dtype is torch.bfloat16:
        return True
    slices = (weight[:1], *weight.split(_SLICE))
    return all(torch.equal(rows.to(torch.bfloat16).to(rows.dtype), rows) for rows in slices)


def linear(x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None = None) -> Tensor:
    """x: [..., k], weight: [n, k] or packed, bias: [n] -> [..., n]; of a gated weight SwiGLU of that, [..., n / 2]."""
    if isinstance(weight, PackedWeight):
        return _packed_linear(x, weight, weight.gated, bias)
    return reference(x, weight, bias)


def ungated_linear(x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None = None) -> Tensor:
    """As `linear`, of a gated weight too without its activation: [..., n], gate columns first."""
    if isinstance(weight, PackedWeight):
        return _packed_linear(x, weight, False, bias)
    return reference(x, weight, bias)


def add_norm_linear(
    x: Tensor, residual: Tensor, norm: Tensor, eps: float, weight: PackedWeight, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """-> (`linear` of the RMSNorm of x + residual, x + residual). x, residual: [..., k]; norm: [k], its weight."""
    if isinstance(weight.data, QuantizedWeight):
        codes = (weight.data.data, weight.data.scale, weight.data.offset)
        return cpu_ops.add_norm_coded_linear(x, residual, norm, eps, *codes, weight.n, weight.gated, bias)
    return cpu_ops.add_norm_linear(x, residual, norm, eps, weight.data, weight.n, weight.gated, bias)


def _packed_linear(x: Tensor, weight: PackedWeight, activated: bool, bias: Tensor | None) -> Tensor:
    if isinstance(weight.data, QuantizedWeight):
        codes = weight.data
        form = weight.n, weight.gated, activated
        return cpu_ops.coded_linear(x, codes.data, codes.scale, codes.offset, *form, bias)
    return cpu_ops.linear(x, weight.data, weight.n, weight.gated, activated, bias)


def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, weight, bias)
