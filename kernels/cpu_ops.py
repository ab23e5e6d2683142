"""The C++ CPU kernels as typed Python functions, and whether a tensor can use them.

`load` builds the library on first use (`kernels.build`). Without it everything still runs, in plain torch.
"""

import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernels import build
from kernels.cpu_isa import isa_asked_for

logger = logging.getLogger(__name__)

_ops: Any = torch.ops.nanoserve


@functools.cache
def load() -> bool:
    """True if the C++ kernels can be called. Builds and loads them the first time; later calls cost nothing.

    Raises `ValueError` if `NANOSERVE_CPU_ISA` names no instruction set, or one that this CPU lacks.
    """
    isa = isa_asked_for()
    library = build.ensure_built()
    if library is None:
        return False
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        logger.warning("CPU kernels at %s do not load, so plain torch runs, several times slower: %s", library, error)
        return False
    use_isa(isa)
    return True


def usable(x: Tensor) -> bool:
    return x.is_cpu and x.dtype is torch.float32 and load()


def use_isa(name: str) -> str:
    """Choose the instruction set: "best" or one of `cpu_isa.ISAS`. Returns the one in use.

    Raises `ValueError` for a name that is unknown or that this CPU lacks.
    """
    used: str = _ops.use_isa(name)
    return used


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out: Tensor = _ops.rms_norm.default(x, weight, eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    out: tuple[Tensor, Tensor] = _ops.add_rms_norm.default(x, residual, weight, eps)
    return out


def silu_and_mul(x: Tensor) -> Tensor:
    out: Tensor = _ops.silu_and_mul.default(x)
    return out


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    out: tuple[Tensor, Tensor] = _ops.apply_rotary.default(q, k, cos, sin, positions)
    return out


def kv_write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    _ops.kv_write.default(k, v, k_cache, v_cache, slots)


def rotary_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
) -> Tensor:
    out: Tensor = _ops.rotary_write.default(q, k, v, cos, sin, positions, k_cache, v_cache, slots)
    return out


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    rows: Tensor,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
) -> Tensor:
    out: Tensor = _ops.paged_attention.default(
        q, k_cache, v_cache, query_start, seq_lens, block_tables, rows, scale, window, soft_cap
    )
    return out


def rotary_attention(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    rows: Tensor,
    scale: float,
    window: int,
    soft_cap: float,
) -> Tensor:
    step = (slots, query_start, seq_lens, block_tables, rows)
    out: Tensor = _ops.rotary_attention.default(
        qkv, cos, sin, positions, k_cache, v_cache, *step, scale, window, soft_cap
    )
    return out


def linear(x: Tensor, packed: Tensor, n: int, gated: bool, activated: bool, bias: Tensor | None) -> Tensor:
    out: Tensor = _ops.linear.default(x, packed, n, gated, activated, bias)
    return out


def coded_linear(
    x: Tensor,
    data: Tensor,
    scale: Tensor,
    offset: Tensor | None,
    n: int,
    gated: bool,
    activated: bool,
    bias: Tensor | None,
) -> Tensor:
    out: Tensor = _ops.coded_linear.default(x, data, scale, offset, n, gated, activated, bias)
    return out


def add_norm_linear(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    packed: Tensor,
    n: int,
    gated: bool,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    out: tuple[Tensor, Tensor] = _ops.add_norm_linear.default(x, residual, weight, eps, packed, n, gated, bias)
    return out


def add_norm_coded_linear(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    data: Tensor,
    scale: Tensor,
    offset: Tensor | None,
    n: int,
    gated: bool,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    out: tuple[Tensor, Tensor] = _ops.add_norm_coded_linear.default(
        x, residual, weight, eps, data, scale, offset, n, gated, bias
    )
    return out


def coded_rows(index: Tensor, data: Tensor, scale: Tensor, offset: Tensor | None, n: int, k: int) -> Tensor:
    out: Tensor = _ops.coded_rows.default(index, data, scale, offset, n, k)
    return out


def add_lora(y: Tensor, x: Tensor, a: Tensor, b: Tensor, parts: Sequence[int], tokens: Tensor, tiles: Tensor) -> None:
    _ops.add_lora.default(y, x, a, b, parts, tokens, tiles)


def shared_sum(x: Tensor, memory: Tensor, rank: int, size: int, number: int, wait_s: float) -> int:
    late: int = _ops.shared_sum.default(x, memory, rank, size, number, wait_s)
    return late


def shared_gather(
    x: Tensor, memory: Tensor, rank: int, size: int, number: int, wait_s: float, out: Tensor | None
) -> int:
    late: int = _ops.shared_gather.default(x, memory, rank, size, number, wait_s, out)
    return late


def pack_rows(source: Tensor, panels: Tensor, first: int) -> bool:
    finite: bool = _ops.pack_rows.default(source, panels, first)
    return finite


def code_rows(
    source: Tensor,
    data: Tensor,
    scale: Tensor,
    offset: Tensor | None,
    first: int,
    step: int,
    start: int,
    exact: bool,
) -> bool:
    found: bool = _ops.code_rows.default(source, data, scale, offset, first, step, start, exact)
    return found


def argmax(x: Tensor) -> Tensor:
    out: Tensor = _ops.argmax.default(x)
    return out


def quantized_linear(
    x: Tensor,
    data: Tensor,
    scale: Tensor,
    rest: Tensor | None,
    n: int,
    gated: bool,
    bias: Tensor | None,
) -> Tensor:
    out: Tensor = _ops.quantized_linear.default(x, data, scale, rest, n, gated, bias)
    return out


def add_quantized_linear(
    total: Tensor, x: Tensor, data: Tensor, scale: Tensor, rest: Tensor | None, n: int, bias: Tensor | None
) -> None:
    _ops.add_quantized_linear.default(total, x, data, scale, rest, n, bias)


def norm_quantized_linear(
    x: Tensor,
    weight: Tensor,
    eps: float,
    data: Tensor,
    scale: Tensor,
    rest: Tensor | None,
    n: int,
    gated: bool,
    bias: Tensor | None,
) -> Tensor:
    out: Tensor = _ops.norm_quantized_linear.default(x, weight, eps, data, scale, rest, n, gated, bias)
    return out


def add_norm_quantized_linear(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    data: Tensor,
    scale: Tensor,
    rest: Tensor | None,
    n: int,
    gated: bool,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    out: tuple[Tensor, Tensor] = _ops.add_norm_quantized_linear.default(
        x, residual, weight, eps, data, scale, rest, n, gated, bias
    )
    return out
