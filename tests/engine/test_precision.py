"""Which numbers a model runs in, by the settings and the device."""

import dataclasses
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.device.precision import Precision, choose_precision
from engine.errors import ConfigError
from engine.model_config import ModelConfig, load_model_config
from kernels import cpu_ops
from tests import tiny_models

CPU, GPU = torch.device("cpu"), torch.device("cuda")
EXACT = Precision(torch.float32, None, None)


@pytest.fixture(scope="module")
def model_config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder: Path = tiny_models.llama(tmp_path_factory.mktemp("model"))
    return load_model_config(folder)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, Precision(torch.float32, "int8", torch.bfloat16)),
        ({"kv_cache_dtype": "int8"}, Precision(torch.float32, "int8", torch.int8)),
        ({"quantization": "int8"}, Precision(torch.float32, "int8", None)),
        ({"dtype": "float32"}, EXACT),
        ({"quantization": "none"}, EXACT),
        ({"quantization": None}, EXACT),
        ({"dtype": "float32", "kv_cache_dtype": "int8"}, Precision(torch.float32, None, torch.int8)),
        ({"dtype": "bfloat16"}, Precision(torch.bfloat16, None, None)),
    ],
)
def test_a_cpu_runs_int8_unless_the_settings_say_otherwise(
    settings: dict[str, object], expected: Precision, model_config: ModelConfig
) -> None:
    assert choose_precision(EngineConfig.from_kwargs(**settings), model_config, CPU) == expected


def test_without_the_kernels_a_cpu_runs_float32(model_config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_ops, "load", lambda: False)
    assert choose_precision(EngineConfig(), model_config, CPU) == EXACT


@pytest.mark.parametrize(
    ("capability", "dtype"), [((7, 5), torch.float16), ((8, 0), torch.bfloat16), ((12, 0), torch.bfloat16)]
)
def test_a_gpu_runs_the_narrow_type_that_it_has_tensor_cores_for(
    capability: tuple[int, int], dtype: torch.dtype, model_config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert choose_precision(EngineConfig(), model_config, GPU) == Precision(dtype, None, None)


def test_gemma_is_not_put_in_float16(model_config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    gemma = dataclasses.replace(model_config, architecture="Gemma2ForCausalLM")
    assert choose_precision(EngineConfig(), gemma, GPU).dtype == torch.float32


def test_a_gpu_takes_no_int8(model_config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ConfigError, match="quantization int8 is for a CPU"):
        choose_precision(EngineConfig(quantization="int8"), model_config, GPU)


def test_what_was_chosen_is_said_in_one_line(model_config: ModelConfig, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        choose_precision(EngineConfig(), model_config, CPU)
    assert caplog.messages == ["weights in int8, as the fastest on a CPU; for exact numbers set dtype to float32"]
