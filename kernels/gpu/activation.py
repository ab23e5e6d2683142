"""SiLU or GELU of the gate times the up projection, in one pass."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _gated_kernel(x, out, n, x_row, GELU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    dtype = out.dtype.element_ty
    gate = tl.load(x + row * x_row + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_row + n + at, mask=inside, other=0.0).to(tl.float32)
    # GELU's tanh form: 0.5 (1 + tanh(z)) is the logistic function of 2 z, z = sqrt(2 / pi) (x + 0.044715 x^3).
    exponent = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate) if GELU else gate
    activated = (gate / (1.0 + tl.exp(-exponent))).to(dtype).to(tl.float32)
    tl.store(out + row * n + at, activated * up, mask=inside)


def silu_and_mul(x: Tensor) -> Tensor:
    """As `kernels.activation.silu_and_mul`."""
    return _gated(x, gelu=False)


def gelu_and_mul(x: Tensor) -> Tensor:
    """As `kernels.activation.gelu_and_mul`."""
    return _gated(x, gelu=True)


def _gated(x: Tensor, gelu: bool) -> Tensor:
    rows, n = x.shape[0], x.shape[1] // 2
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    if rows:
        grid = (rows, triton.cdiv(n, _BLOCK))
        _gated_kernel[grid](x, out, n, x.stride(0), GELU=gelu, BLOCK=_BLOCK, num_warps=4)
    return out
