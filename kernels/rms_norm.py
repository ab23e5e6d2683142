"""Root mean square normalisation (Zhang and Sennrich, 2019), plain and fused with the residual add.

Used before attention, before the MLP, before the output head, and on the heads of q and k where a model norms them.
Rounding follows Hugging Face's Llama: normalise in float32, cast to x's type, then multiply by the weight.
Nothing is written in place: the residual is read again later.
"""

import torch
from torch import Tensor

from kernels import cpu_ops, gpu


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x: [..., n], weight: [n] -> [..., n], of x's type."""
    if cpu_ops.usable(x):
        return cpu_ops.rms_norm(x, weight, eps)
    if gpu.usable(x):
        from kernels.gpu import norm

        return norm.rms_norm(x, weight, eps)
    return reference(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x, residual: [..., n], weight: [n] -> (normed sum, sum), both [..., n]."""
    if cpu_ops.usable(x):
        return cpu_ops.add_rms_norm(x, residual, weight, eps)
    if gpu.usable(x):
        from kernels.gpu import norm

        return norm.add_rms_norm(x, residual, weight, eps)
    return add_reference(x, residual, weight, eps)


def reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.float32)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def add_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = residual + x
    return reference(total, weight, eps), total
