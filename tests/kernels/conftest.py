import os
from pathlib import Path

import pytest

from kernels import cpu_ops
from kernels.cpu_isa import ISAS

collect_ignore = [] if os.environ.get("TRITON_INTERPRET") else ["interpreted"]
"""Run by `test_interpreted.py`, in a process of their own."""

_AVX2 = {"avx2", "fma"}
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
NEEDED = {
    "portable": set(),
    "avx2": _AVX2,
    "avx2_vnni": _AVX2 | {"avx_vnni"},
    "avx512": _AVX512,
    "avx512_vnni": _AVX512 | {"avx512_vnni"},
    "avx512_bf16": _AVX512 | {"avx512_vnni", "avx512_bf16"},
}


def _supported(isa: str) -> bool:
    """By the system's reading of the CPU, not ours."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((line.split(":")[1].split() for line in lines if line.startswith("flags")), [])
    return NEEDED[isa] <= set(flags)


@pytest.fixture(params=ISAS)
def isa(request):
    """Each instruction set in turn; one that this CPU lacks must be refused by name, then portable runs instead."""
    assert cpu_ops.load(), "the C++ kernels did not build: run python -m kernels.build to see why"
    if _supported(request.param):
        assert cpu_ops.use_isa(request.param) == request.param
    else:
        with pytest.raises(ValueError, match=request.param):
            cpu_ops.use_isa(request.param)
        cpu_ops.use_isa("portable")
    yield request.param
    cpu_ops.use_isa("best")
