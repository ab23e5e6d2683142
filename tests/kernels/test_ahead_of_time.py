"""Every Triton kernel compiled for every card that it claims, without one: no spills, and shared memory that fits.

What is compiled is what the launchers launch (`tests/kernels/ahead_of_time.py`). The shapes are those of models of 1 to
8 billion parameters and the widest heads that the kernels take.
"""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from tests.kernels import ahead_of_time
from tests.kernels.ahead_of_time import CAPABILITIES, Compiled, launched_kernels


@pytest.fixture(scope="module")
def compiled():
    """Capability -> case -> kernels. Two processes: the compiler runs in one thread."""
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        return dict(zip(CAPABILITIES, pool.map(ahead_of_time.compile_all, CAPABILITIES), strict=True))


def test_every_kernel_that_is_launched_is_compiled_here():
    assert launched_kernels() == ahead_of_time.KERNELS


@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda c: f"{c[0]}{c[1]}")
def test_kernels_compile_without_spills_and_fit_the_card(compiled, capability):
    limit = ahead_of_time.shared_memory(capability)
    cases = compiled[capability]
    claimed = ahead_of_time.KERNELS if capability >= (8, 0) else ahead_of_time.KERNELS - ahead_of_time.TENSOR_CORES
    assert {kernel.name for kernels in cases.values() for kernel in kernels} == claimed
    for case, kernels in cases.items():
        for kernel in kernels:
            assert kernel.stack == 0, (case, kernel.name, kernel.stack)
            assert kernel.shared <= limit, (case, kernel.name, kernel.shared)
            assert 0 < kernel.registers <= 255, (case, kernel.name)


@pytest.mark.parametrize("capability", [c for c in CAPABILITIES if c >= (8, 0)], ids=lambda c: f"{c[0]}{c[1]}")
def test_attention_uses_tensor_cores_and_asynchronous_copies(compiled, capability):
    cases = compiled[capability]
    attention = [k for kernels in cases.values() for k in kernels if k.name == "_attention_kernel"]
    assert attention
    assert all(k.tensor_cores for k in attention)
    assert all(k.async_copies for k in attention)
    newest = {(9, 0): "wgmma", (10, 0): "tcgen05.mma"}.get(capability, "mma.sync")
    assert [k.tensor_cores for k in cases["prompt"]] == [newest]


def test_cards_without_tensor_cores_for_triton_get_decodes_alone(compiled):
    kernels: list[Compiled] = [k for kernels in compiled[7, 5].values() for k in kernels]
    assert not any(k.tensor_cores for k in kernels)
    assert not any("prompt" in case for case in compiled[7, 5])
