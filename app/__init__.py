"""The Ray Serve application: `serve run app:deployment`, or `serve run app:build model=... max_model_len=...`.

Nothing is imported or built before one of the two is asked for.
"""

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve import Application

__all__ = ["__version__", "build", "deployment"]

__version__ = "0.1.0"


def build(args: dict[str, Any]) -> "Application":
    """The application with `args` over `NANOSERVE_*` variables over defaults. Raises `ConfigError`."""
    from app.building import build_application
    from app.settings import load_settings
    from engine.errors import ConfigError

    try:
        return build_application(load_settings(args))
    except ConfigError as error:
        _tell_without_traceback(ConfigError)
        # Of a YAML file Serve builds elsewhere, and shows what is left of the traceback above the message.
        raise error.with_traceback(None) from None


def _tell_without_traceback(kind: type[Exception]) -> None:
    """Let an error of this kind that nobody catches end the program with its message alone: `serve run` would bury it
    under twenty lines of Serve's own."""
    default = sys.excepthook

    def told(error_type: Any, error: Any, traceback: Any) -> None:
        if isinstance(error, kind):
            print(f"nanoserve: {error}", file=sys.stderr)
        else:
            default(error_type, error, traceback)

    sys.excepthook = told


def __getattr__(name: str) -> Any:
    if name == "deployment":
        return build({})
    raise AttributeError(f"module 'app' has no attribute {name!r}")
