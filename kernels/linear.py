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

from kernels import cpu_ops
from kernels.quantized_weight import PANEL, QuantizedWeight, exact_codes

_SLICE = 64 * PANEL
"""Rows that are packed at a time: a whole output matrix would be held three times meanwhile."""


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


def pack_weight(weight: Tensor) -> Tensor | PackedWeight:
    """weight: [n, k] -> its packed form where the C++ kernel can take it, else the weight itself."""
    if not cpu_ops.usable(weight):
        return weight
    n, k = weight.shape
    slices = weight.split(_SLICE)
    if k % 2 == 0 and all(torch.equal(rows.to(torch.bfloat16).float(), rows) for rows in slices):
        data = torch.empty(-(-n // PANEL), k // 2, PANEL, 2, dtype=torch.bfloat16)
    elif codes := exact_codes(weight):
        return PackedWeight(codes, n, k)
    else:
        data = torch.empty(-(-n // PANEL), k, PANEL, 1)
    depth = data.shape[-1]
    for rows, panels in zip(slices, data.split(_SLICE // PANEL), strict=True):
        padded = F.pad(rows, (0, 0, 0, -len(rows) % PANEL))
        panels.copy_(padded.view(-1, PANEL, k // depth, depth).transpose(1, 2))
    return PackedWeight(data if depth == 2 else data.squeeze(-1), n, k)


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
