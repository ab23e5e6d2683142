"""A dense layer in 8-bit whole numbers: y = x W^T + bias, optionally with an RMSNorm before it and SwiGLU after it.

Used by every projection and the output head when a model runs with `quantization="int8"`. Weights are quantised once,
activations as they come; both symmetric, with a scale for each GROUP weights and each ACTIVATION_GROUP activations
along k (after ZeroQuant, Yao et al., 2022; weights of GGUF's Q8_0 come out exactly). For activations that keeps the
outliers of a transformer, which sit in few channels, from taking the precision of the others; for weights it halves the
divergence that one scale for a whole output column leaves. Products of a group are added up exactly in whole numbers,
groups in float32.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import activation, cpu_ops, rms_norm
from kernels.linear import PANEL

GROUP = 32
"""Weights along k that share a scale; `kGroup` in the C++ kernel."""

ACTIVATION_GROUP = 16
"""Activations that share a scale; `kActivationGroup` in the C++ kernel."""

TINY = 1e-30
"""A group whose largest magnitude is at most this counts as zero; `kTiny` in the C++ kernel."""


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A [n, k] weight in 8 bits, in panels of PANEL output columns, padded: columns to panels, k to groups.

    data: uint8 [panels, k / 4, PANEL, 4], 128 added to the values, which are from -127 to 127.
    scale: float16 [panels, k / GROUP, PANEL].
    gated: rows are a gate projection, then an up projection, as in SwiGLU; their panels alternate, and the layer
        gives SiLU(gate) * up, n / 2 columns.
    """

    data: Tensor
    scale: Tensor
    n: int
    k: int
    gated: bool

    def rows(self, index: Tensor) -> Tensor:
        """index: [m], each below n -> float32 [m, k], those rows as their 8 bits stand for them; not for gated."""
        panel, column = index // PANEL, index % PANEL
        values = self.data[panel, :, column].unflatten(1, (-1, GROUP // 4)).flatten(2).float() - 128.0
        rows: Tensor = values * self.scale[panel, :, column, None].float()  # [m, k / GROUP, GROUP]
        return rows.flatten(1)[:, : self.k]


def quantize_weight(weight: Tensor, gated: bool = False) -> QuantizedWeight:
    """weight: [n, k] on a CPU -> 8 bits. gated: see `QuantizedWeight`; n is even then."""
    n, k = weight.shape
    weight = weight.float()
    if gated:
        halves = F.pad(weight.view(2, n // 2, k), (0, 0, 0, -(n // 2) % PANEL))
        weight = halves.view(2, -1, PANEL, k).transpose(0, 1).reshape(-1, k)
    groups = F.pad(weight, (0, -k % GROUP, 0, -len(weight) % PANEL)).view(-1, PANEL, -(-k // GROUP), GROUP)
    scale = (groups.abs().amax(-1) / 127.0).half()
    inverse = torch.where(scale > 0, 1.0 / scale.float(), 0.0)
    values = (groups * inverse[..., None]).round_().clamp_(-127, 127)
    data = (values + 128).to(torch.uint8).view(len(groups), PANEL, -1, 4).transpose(1, 2).contiguous()
    return QuantizedWeight(data, scale.transpose(1, 2).contiguous(), n, k, gated)


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """x: float32 [..., n] -> (whole numbers from -127 to 127, still float32 [..., n], scale [..., 1])."""
    top = x.abs().amax(-1, keepdim=True)
    # full_like: torch turns number / tensor into a reciprocal and a product, rounded twice.
    inverse = torch.where(top > TINY, torch.full_like(top, 127.0) / top, 0.0)
    return (x * inverse).round_(), top / 127.0  # halves go to even


def quantized_linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """x: [..., k], bias: [n] -> float32 [..., n], or [..., n / 2] of a gated weight."""
    if cpu_ops.usable(x):
        return cpu_ops.quantized_linear(x, weight.data, weight.scale, weight.n, weight.gated, bias)
    return reference(x, weight, bias)


def norm_quantized_linear(
    x: Tensor,
    residual: Tensor | None,
    norm: Tensor,
    eps: float,
    weight: QuantizedWeight,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """-> (`quantized_linear` of the RMSNorm of x + residual, x + residual).

    x, residual: [..., k], no residual counts as zero; norm: [k], the weight of the RMSNorm; bias: [n].
    """
    if cpu_ops.usable(x):
        packed = (weight.data, weight.scale, weight.n, weight.gated, bias)
        if residual is None:
            return cpu_ops.norm_quantized_linear(x, norm, eps, *packed), x
        return cpu_ops.add_norm_quantized_linear(x, residual, norm, eps, *packed)
    total = x if residual is None else residual + x
    return reference(rms_norm.reference(total, norm, eps), weight, bias), total


def reference(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    halves, scales = quantize(F.pad(x.float(), (0, -weight.k % GROUP)).unflatten(-1, (-1, ACTIVATION_GROUP)))
    y = torch.zeros(*x.shape[:-1], len(weight.data) * PANEL)
    steps = weight.data.unflatten(1, (-1, ACTIVATION_GROUP // 4))  # [panels, k / 16, 4, PANEL, 4]
    for h in range(steps.shape[1]):
        columns = steps[:, h].transpose(1, 2).reshape(-1, ACTIVATION_GROUP).float() - 128.0
        scale = weight.scale[:, h * ACTIVATION_GROUP // GROUP].flatten().float() * scales[..., h, :]
        # Whole numbers under 2^24: exact in float32 in whatever order they are added.
        y += F.linear(halves[..., h, :], columns) * scale
    y = y[..., _gated_order(weight.n)] if weight.gated else y[..., : weight.n]
    if bias is not None:
        y = y + bias
    return activation.reference(y) if weight.gated else y


def _gated_order(n: int) -> Tensor:
    """Where the rows of a gated weight are among its panels' columns: int64 [n]."""
    row = torch.arange(n // 2)
    gate = row // PANEL * 2 * PANEL + row % PANEL
    return torch.cat((gate, gate + PANEL))
