"""A compiled forward gives what the plain one gives, for any number of tokens, and is compiled before it is needed."""

from pathlib import Path

import pytest
import torch

from engine.engine import Engine
from engine.errors import ConfigError
from engine.model_runner import ModelRunner
from engine.sampling_params import SamplingParams
from kernels import cpu_ops
from tests import tiny_models
from tests.engine.build import build_engine
from tests.scripted import drain

PROMPTS = [[(3 + 5 * i + 11 * j) % 380 + 3 for j in range(length)] for i, length in enumerate((1, 15, 33))]


def test_a_compiled_forward_gives_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_ops, "load", lambda: False)  # the C++ kernels cannot be traced
    folder = tiny_models.qwen3(tmp_path / "model", num_hidden_layers=2)

    def run(engine: Engine) -> dict[str, list[int]]:
        for i, prompt in enumerate(PROMPTS):
            engine.add_request(str(i), prompt, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
        return drain(engine)

    expected = run(build_engine(folder, max_num_batched_tokens=24))
    engine = build_engine(folder, max_num_batched_tokens=24)
    assert isinstance(engine.runner, ModelRunner)
    engine.runner.compile_forward("aot_eager")  # all but the C++ compiler's minute
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert run(engine) == expected


def test_compilation_is_for_a_gpu(tmp_path: Path) -> None:
    folder = tiny_models.llama(tmp_path / "model")
    with pytest.raises(ConfigError, match="compilation is for a GPU"):
        build_engine(folder, compilation=True)
