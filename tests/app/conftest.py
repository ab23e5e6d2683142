from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.text.tokenizer import Tokenizer, load_tokenizer
from tests import tiny_models
from tests.app.harness import Server, running
from tests.scripted import ScriptedRunner
from tests.wheel import installed

APP_OPTIONS = (
    "capacity", "max_waiting", "stream_commit_s", "chat_template", "tool_call_parser", "reasoning_parser", "doors",
    "lora_modules", "allow_updates", "send_buffer",
)  # fmt: skip
"""Of `tests.app.harness.running`; the rest is the engine's."""

Serve = Callable[..., AbstractAsyncContextManager[Server]]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the project's wheel is installed."""
    return installed(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Tokenizer:
    return load_tokenizer(model_dir)


@pytest.fixture
def scripted(tokenizer: Tokenizer) -> Serve:
    """The application over a model that emits `script`: text, or token ids."""

    def serve(script: str | list[int] = "hello there", *, before_step: Any = None, **options: Any) -> Any:
        app_options = {name: options.pop(name) for name in APP_OPTIONS if name in options}
        ids = tokenizer.encode(script, add_special_tokens=False) if isinstance(script, str) else script
        hooks = {"before_step": before_step} if before_step is not None else {}
        return running(Engine(ScriptedRunner(ids, **hooks, **options)), tokenizer, **app_options)

    return serve


@pytest.fixture
def real(model_dir: Path, tokenizer: Tokenizer) -> Serve:
    """The application over a tiny random model."""

    def serve(**settings: Any) -> Any:
        defaults = {
            "model": str(model_dir),
            "dtype": "float32",
            "max_model_len": 128,
            "num_gpu_blocks_override": 64,
            "num_threads": 1,
        }
        app_options = {name: settings.pop(name) for name in APP_OPTIONS if name in settings}
        return running(Engine.from_config(EngineConfig(**(defaults | settings))), tokenizer, **app_options)

    return serve
