"""The Ray Serve application: `serve run app:deployment`, or `serve run app:build model=... max_model_len=...`.

Nothing is imported or built before one of the two is asked for.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve import Application

__all__ = ["__version__", "build", "deployment"]

__version__ = "0.1.0"


def build(args: dict[str, Any]) -> "Application":
    """The application with `args` over `NANOSERVE_*` variables over defaults. Raises `ConfigError`."""
    from app.building import build_application
    from app.settings import load_settings

    return build_application(load_settings(args))


def __getattr__(name: str) -> Any:
    if name == "deployment":
        return build({})
    raise AttributeError(f"module 'app' has no attribute {name!r}")
