"""Loads the engine before anything can load torch, since it sets how OpenMP's threads wait; fuzzing profiles."""

from hypothesis import HealthCheck, settings

import engine  # noqa: F401

_QUIET = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "print_blob": False}
settings.register_profile("thorough", max_examples=3000, stateful_step_count=60, **_QUIET)
settings.register_profile("normal", max_examples=100, stateful_step_count=40, **_QUIET)
settings.load_profile("normal")
