"""A dense layer, y = x W^T + bias, with weights laid out for a CPU.

Used by every projection and by the output head. torch's own float32 matrix product leaves half the speed of some CPUs
unused and reads weights as float32; the packed form here is read in the order it is used, and is as narrow as it can be
without loss: bfloat16 for a checkpoint stored in that, whole numbers of 8 or 4 bits for one that was quantised (GGUF).
That divides the memory and the traffic of a decode step by 2, 4 or 6. Arithmetic is float32 in every form.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import cpu_ops, huge_pages
from kernels.quantized_weight import PANEL, QuantizedWeight, exact_codes

_SLICE = 16 * PANEL
"""Rows that are looked at and converted at a time: of a whole output matrix more copies would be held meanwhile."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A [n, k] weight as panels of PANEL output columns; the last is padded with zeros.

    data: float32 [ceil(n / PANEL), k, PANEL], or bfloat16 [ceil(n / PANEL), k / 2, PANEL, 2], or exact codes.
    """

    data: Tensor | QuantizedWeight
    n: int
    k: int

    def unpack(self) -> Tensor:
        """The weight as it was: float32 [n, k]."""
        if isinstance(self.data, QuantizedWeight):
            return self.data.unpack()
        pairs = self.data if self.data.dim() == 4 else self.data.unsqueeze(-1)
        return pairs.transpose(1, 2).reshape(-1, self.k)[: self.n].float()


def packs(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether weights of this type on this device have a packed form."""
    return device.type == "cpu" and dtype is torch.float32 and cpu_ops.load()


def pack_weight(*parts: Tensor) -> PackedWeight:
    """parts: [rows, k] on a CPU, one under the other, of any floating type -> their packed form, where `packs`."""
    assert cpu_ops.load()
    n, k = sum(map(len, parts)), parts[0].shape[1]
    if k % 2 == 0 and all(_fits_bfloat16(part) for part in parts):
        data = huge_pages.empty((-(-n // PANEL), k // 2, PANEL, 2), torch.bfloat16)
    elif codes := exact_codes(*parts):
        return PackedWeight(codes, n, k)
    else:
        data = huge_pages.empty((-(-n // PANEL), k, PANEL), torch.float32)
    row = 0
    for part in parts:
        for rows in part.split(_SLICE):
            cpu_ops.pack_rows(rows.to(data.dtype).contiguous(), data, row)
            row += len(rows)
    if used := n % PANEL:
        data[-1, :, used:] = 0
    return PackedWeight(data, n, k)


def _fits_bfloat16(weight: Tensor) -> bool:
    """Whether all values are bfloat16 numbers; where not, usually the first row shows it."""
    if weight.dtype is torch.bfloat16:
        return True
    slices = (weight[:1], *weight.split(_SLICE))
    return all(torch.equal(rows.to(torch.bfloat16).to(rows.dtype), rows) for rows in slices)


def linear(x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None = None) -> Tensor:
    """x: [..., k], weight: [n, k] or packed, bias: [n] -> [..., n]."""
    if isinstance(weight, PackedWeight):
        if isinstance(weight.data, QuantizedWeight):
            codes = weight.data
            return cpu_ops.coded_linear(x, codes.data, codes.scale, codes.offset, codes.n, bias)
        return cpu_ops.linear(x, weight.data, weight.n, bias)
    return reference(x, weight, bias)


def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, weight, bias)
