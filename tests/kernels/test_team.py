"""The C++ kernels' own threads: right results whoever shares them, after a fork, and beside busy neighbours."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kernels import cpu_ops
from kernels.linear import linear, pack_weight


@pytest.fixture
def four_threads():
    assert cpu_ops.load()
    usual = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(usual)


def test_jobs_of_several_threads_at_once_do_not_mix(four_threads):
    pack = pack_weight(torch.randn(480, 256))
    inputs = [torch.randn(3, 256) for _ in range(4)]
    expected = [linear(x, pack) for x in inputs]

    def repeat(i):
        torch.set_num_threads(4)  # the setting is each thread's own
        return all(torch.equal(linear(inputs[i], pack), expected[i]) for _ in range(200))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(repeat, range(4)))


def test_many_short_jobs_lose_no_piece(four_threads):
    pack, x = pack_weight(torch.randn(4800, 8)), torch.randn(1, 8)
    expected = linear(x, pack)
    assert all(torch.equal(linear(x, pack), expected) for _ in range(5000))


_FORK = """
import os, torch
from kernels import cpu_ops
from kernels.linear import linear, pack_weight
torch.set_num_threads(2)
pack, x = pack_weight(torch.randn(4800, 64)), torch.randn(3, 64)
expected = linear(x, pack)
child = os.fork()
same = all(torch.equal(linear(x, pack), expected) for _ in range(100))
if child == 0:
    os._exit(0 if same else 1)
assert os.waitpid(child, 0)[1] == 0 and same
"""


def test_a_forked_process_computes_on():
    assert cpu_ops.load()
    done = subprocess.run([sys.executable, "-c", _FORK], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
