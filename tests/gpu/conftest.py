"""Loaded in place of the suite's own, which needs more packages than a CUDA image has."""

import engine  # noqa: F401  before torch, since it sets how OpenMP's threads wait
