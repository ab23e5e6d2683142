"""SiLU of the gate times the up projection, in one pass."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _silu_and_mul_kernel(x, out, n, x_row, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    dtype = out.dtype.element_ty
    gate = tl.load(x + row * x_row + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_row + n + at, mask=inside, other=0.0).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out + row * n + at, activated * up, mask=inside)


def silu_and_mul(x: Tensor) -> Tensor:
    """As `kernels.activation.silu_and_mul`."""
    rows, n = x.shape[0], x.shape[1] // 2
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    if rows:
        _silu_and_mul_kernel[(rows, triton.cdiv(n, _BLOCK))](x, out, n, x.stride(0), BLOCK=_BLOCK, num_warps=4)
    return out
