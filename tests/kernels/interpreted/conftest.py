import warnings

import pytest
import torch
import triton

assert triton.knobs.runtime.interpret, "these tests are run by tests/kernels/test_interpreted.py"
# The interpreter computes on numpy arrays, where a masked lane may overflow.
warnings.filterwarnings("ignore", category=RuntimeWarning)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
