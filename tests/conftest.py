"""Loads the engine before anything can load torch: it sets how OpenMP's threads wait."""

import engine  # noqa: F401
