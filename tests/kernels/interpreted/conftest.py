import warnings

import triton

assert triton.knobs.runtime.interpret, "these tests are run by tests/kernels/test_interpreted.py"
# The interpreter computes on numpy arrays, where a masked lane may overflow.
warnings.filterwarnings("ignore", category=RuntimeWarning)
