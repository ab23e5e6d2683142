"""A dense layer in whole numbers: y = x W^T + bias, optionally with an RMSNorm before it and SwiGLU after it.

Used by every projection and the output head when a model runs with `quantization="int8"`. Weights are quantised once
(`kernels.quantized_weight`), activations to 8 bits as they come, with a step for each GROUP of them along k (after
ZeroQuant, Yao et al., 2022), here a power of two. A transformer's outliers sit in few channels and would take the
precision of their group: those of each row stay in float32 (after LLM.int8(), Dettmers et al., 2022), which divides the
divergence from float32 by three. Products of a group are added up exactly in whole numbers, groups and then outliers in
float32.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import activation, cpu_ops, rms_norm
from kernels.quantized_weight import GROUP, PANEL, QuantizedWeight

OUTLIER = 2.0
"""Activations above so many times the mean of their groups' largest stay in float32; `kOutlier` in the C++ kernel."""

TINY = 1e-30
"""A group whose largest magnitude is at most this counts as zero; `kTiny` in the C++ kernel."""


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """x: float32 [..., n] -> (whole numbers from -127 to 127, still float32 [..., n], step [..., 1]).

    A step is a power of two: a kernel then need not multiply by it.
    """
    top = x.abs().amax(-1, keepdim=True)
    bits = (top / 127.0).view(torch.int32)
    step = (bits + 0x7FFFFF & 0x7F800000).view(torch.float32)  # rounded up to an exponent without a mantissa
    step = torch.where(top > TINY, step, 1.0)
    return (x / step).round_(), step  # halves go to even


def without_outliers(groups: Tensor) -> tuple[Tensor, Tensor]:
    """groups: float32 [..., groups, GROUP] -> (the same with zeros in place of outliers, the outliers among zeros)."""
    tops = groups.abs().amax(-1, keepdim=True)
    loud = groups.abs() > OUTLIER * tops.mean(-2, keepdim=True)
    loud &= loud.flatten(-2).cumsum(-1).view(loud.shape) < groups.shape[-2]  # a row has room for so many
    return groups.masked_fill(loud, 0.0), groups.masked_fill(~loud, 0.0)


def quantized_linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """x: [..., k], bias: [n] -> float32 [..., n], or [..., n / 2] of a gated weight."""
    if cpu_ops.usable(x):
        return cpu_ops.quantized_linear(x, *_operands(weight), bias)
    return reference(x, weight, bias)


def add_quantized_linear(total: Tensor, x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> None:
    """total += `quantized_linear` of x, for a weight that is not gated. total: contiguous [rows, n], x: [rows, k]."""
    if cpu_ops.usable(x):
        data, scale, rest, n, _ = _operands(weight)
        cpu_ops.add_quantized_linear(total, x, data, scale, rest, n, bias)
    else:
        total += reference(x, weight, bias)


def ungated_linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """As `quantized_linear`, of a gated weight too without its activation: float32 [..., n], gate columns first."""
    if not weight.gated:
        return quantized_linear(x, weight, bias)
    y = quantized_linear(x, replace(weight, n=len(weight.data) * PANEL, gated=False))
    halves = y.unflatten(-1, (-1, 2, PANEL)).transpose(-3, -2).flatten(-2)[..., : weight.n // 2]
    columns: Tensor = halves.flatten(-2)
    return columns if bias is None else columns + bias


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
        if residual is None:
            return cpu_ops.norm_quantized_linear(x, norm, eps, *_operands(weight), bias), x
        return cpu_ops.add_norm_quantized_linear(x, residual, norm, eps, *_operands(weight), bias)
    total = x if residual is None else residual + x
    return reference(rms_norm.reference(total, norm, eps), weight, bias), total


def reference(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    quiet, loud = without_outliers(F.pad(x.float(), (0, -weight.k % GROUP)).unflatten(-1, (-1, GROUP)))
    codes = weight.codes().flatten(0, 1)  # [columns, k / GROUP, GROUP]
    scales = weight.scale.transpose(1, 2).flatten(0, 1).float()  # [columns, k / GROUP]
    if weight.offset is not None:
        codes -= 8
    values, steps = quantize(quiet)
    y = _sum_of_products(values, steps, codes, scales)
    weights = codes * scales[..., None]
    if weight.rest is not None:
        rests, rest_scale = weight.rest.codes().flatten(0, 1), weight.rest.scale().flatten()[:, None].float()
        groups = scales.shape[1]
        sums = F.pad(values.sum(-1) * steps.squeeze(-1), (0, -groups % GROUP)).unflatten(-1, (-1, GROUP))
        padded = F.pad(rests, (0, sums.shape[-2] * GROUP - rests.shape[1])).unflatten(-1, (-1, GROUP))
        y += _sum_of_products(*quantize(sums), padded, rest_scale.expand(-1, sums.shape[-2]))
        weights += (rests * rest_scale)[:, :groups, None]
    y += F.linear(loud.flatten(-2), weights.flatten(1))
    y = y[..., _gated_order(weight.n)] if weight.gated else y[..., : weight.n]
    if bias is not None:
        y = y + bias
    return activation.reference(y) if weight.gated else y


def _sum_of_products(values: Tensor, steps: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """values: whole numbers [..., groups, GROUP], steps: [..., groups, 1], codes: [columns, groups, GROUP],
    scales: [columns, groups] -> [..., columns]."""
    y = torch.zeros(*values.shape[:-2], len(codes))
    for g in range(codes.shape[1]):
        # Whole numbers under 2^24: exact in float32 in whatever order they are added.
        y += F.linear(values[..., g, :], codes[:, g]) * (scales[:, g] * steps[..., g, :])
    return y


def _operands(weight: QuantizedWeight) -> tuple[Tensor, Tensor, Tensor | None, int, bool]:
    rest = weight.rest
    return weight.data, weight.scale, None if rest is None else rest.data, weight.n, weight.gated


def _gated_order(n: int) -> Tensor:
    """Where the rows of a gated weight are among its panels' columns: int64 [n]."""
    row = torch.arange(n // 2)
    gate = row // PANEL * 2 * PANEL + row % PANEL
    return torch.cat((gate, gate + PANEL))
