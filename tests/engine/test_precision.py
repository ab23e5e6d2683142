"""Which numbers a model runs in, by the settings and the device."""

import dataclasses
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.model_config import ModelConfig, load_model_config
from engine.precision import Precision, choose_precision
from tests import tiny_models

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(scope="module")
def model_config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder: Path = tiny_models.llama(tmp_path_factory.mktemp("model"))
    return load_model_config(folder)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, Precision(torch.float32, None, None)),
        ({"quantization": "int8"}, Precision(torch.float32, "int8", None)),
        ({"quantization": "int8", "kv_cache_dtype": "int8"}, Precision(torch.float32, "int8", torch.int8)),
        ({"kv_cache_dtype": "bfloat16"}, Precision(torch.float32, None, torch.bfloat16)),
        ({"kv_cache_dtype": "fp8"}, Precision(torch.float32, None, torch.float8_e4m3fn)),
        ({"dtype": "bfloat16"}, Precision(torch.bfloat16, None, None)),
    ],
)
def test_a_cpu_computes_in_float32_unless_the_settings_say_otherwise(
    settings: dict[str, object], expected: Precision, model_config: ModelConfig
) -> None:
    assert choose_precision(EngineConfig.from_kwargs(**settings), model_config, CPU) == expected


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
