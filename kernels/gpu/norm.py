"""RMSNorm, plain and with the residual add: one program a row, one pass over memory."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["inner"])
def _norm_kernel(x, residual, weight, out, total, n, inner, x_outer, x_inner, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < n
    dtype = out.dtype.element_ty
    values = tl.load(x + row // inner * x_outer + row % inner * x_inner + at, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        values += tl.load(residual + row * n + at, mask=inside, other=0.0).to(tl.float32)
        rounded = values.to(dtype)
        tl.store(total + row * n + at, rounded, mask=inside)
        values = rounded.to(tl.float32)
    normed = values * tl.rsqrt(tl.sum(values * values, axis=0) / n + eps)
    scale = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * n + at, scale * normed.to(dtype).to(tl.float32), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `kernels.rms_norm.rms_norm`; rows of x may lie apart, as heads of a fused projection do."""
    if x.stride(-1) != 1 or x.dim() > 3:
        x = x.contiguous()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch(x, None, weight, out, None, eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As `kernels.rms_norm.add_rms_norm`."""
    x, residual = x.contiguous(), residual.contiguous()
    out, total = torch.empty_like(x), torch.empty_like(x)
    _launch(x, residual, weight, out, total, eps)
    return out, total


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, out: Tensor, total: Tensor | None, eps: float) -> None:
    n = x.shape[-1]
    rows = x.numel() // n
    if rows == 0:
        return
    if x.dim() == 3:
        inner, x_outer, x_inner = x.shape[1], x.stride(0), x.stride(1)
    else:
        inner, x_outer, x_inner = 1, x.stride(0) if x.dim() == 2 else n, 0
    block = triton.next_power_of_2(n)
    warps = 1 if block <= 256 else 4 if block <= 2048 else 8
    _norm_kernel[(rows,)](
        x, residual, weight, out, total, n, inner, x_outer, x_inner, eps, BLOCK=block, num_warps=warps
    )
