"""Where built kernels and fetched models are kept."""

import os
from pathlib import Path

from platformdirs import user_cache_dir


def cache_dir() -> Path:
    """`NANOSERVE_CACHE`, or the user's cache folder. It may not exist yet."""
    return Path(os.environ.get("NANOSERVE_CACHE") or user_cache_dir("nanoserve")).expanduser()
