"""Where built kernels and fetched models are kept."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """`NANOSERVE_CACHE`, or the user's cache folder. It may not exist yet."""
    if chosen := os.environ.get("NANOSERVE_CACHE"):
        return Path(chosen).expanduser()
    try:
        from platformdirs import user_cache_dir
    except ModuleNotFoundError:  # a bare CUDA image
        return Path("~/.cache/nanoserve").expanduser()
    return Path(user_cache_dir("nanoserve"))
