"""Activations of a gated MLP (Shazeer, 2020): SiLU or GELU of the gate times the up projection.

Used by the MLP, whose gate and up projections are one fused matrix.
"""

import torch.nn.functional as F
from torch import Tensor

from kernels import cpu_ops, gpu


def silu_and_mul(x: Tensor) -> Tensor:
    """x: [tokens, 2 * n], gate columns first, then up -> [tokens, n], of x's type."""
    if cpu_ops.usable(x):
        return cpu_ops.silu_and_mul(x)
    if gpu.usable(x):
        from kernels.gpu import activation

        return activation.silu_and_mul(x)
    return reference(x)


def reference(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_and_mul(x: Tensor) -> Tensor:
    """As `silu_and_mul`, with GELU in its tanh form, which torch computes fast on a CPU."""
    if gpu.usable(x):
        from kernels.gpu import activation

        return activation.gelu_and_mul(x)
    return gelu_reference(x)


def gelu_reference(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up
