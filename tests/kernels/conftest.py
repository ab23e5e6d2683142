import pytest
import torch

from kernels import cpu_ops

CAPABILITIES = {"portable": {"DEFAULT", "AVX2", "AVX512"}, "avx2": {"AVX2", "AVX512"}, "avx512": {"AVX512"}}


def _supported(isa: str) -> bool:
    """By torch's own reading of the CPU, not ours."""
    return torch.backends.cpu.get_cpu_capability() in CAPABILITIES[isa]


@pytest.fixture(params=cpu_ops.ISAS)
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
