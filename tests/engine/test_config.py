import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError, InvalidRequestError
from engine.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 0}, "max_model_len must be a whole number of at least 2, got 0"),
        ({"max_num_seqs": 1.5}, "max_num_seqs"),
        ({"max_num_batched_tokens": True}, "max_num_batched_tokens"),
        ({"gpu_memory_utilization": 0}, "gpu_memory_utilization must be above 0 and at most 1"),
        ({"block_size": -1}, "block_size"),
        ({"dtype": "int3"}, "dtype must be one of auto, float32, bfloat16, float16, got 'int3'"),
        ({"model": ""}, "model must be"),
        ({"quantization": "int3"}, "quantization must be auto, int8 or none, got 'int3'"),
        ({"kv_cache_dtype": "int3"}, "kv_cache_dtype must be one of"),
        ({"cache_dtype": "int8", "kv_cache_dtype": "int8"}, "one setting"),
        ({"gpu_memory_utilization": "x"}, "gpu_memory_utilization must be above 0"),
        ({"num_threads": 10**6}, "num_threads must be at most 1024"),
        ({"num_threads": "x"}, "num_threads must be a whole number"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be a whole number of at least 1, got 0"),
        ({"tensor_parallel_size": 2.0}, "tensor_parallel_size must be a whole number"),
        ({"swap_space": float("nan")}, "swap_space must be a number of GiB, 0 or more, got nan"),
        ({"swap_space": float("inf")}, "swap_space must be a number of GiB, 0 or more, got inf"),
        ({"max_num_seqs": 10**9}, "max_num_seqs must be at most 65536"),
        ({"seed": "x"}, "seed must be a whole number"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching must be true or false"),
        ({"async_scheduling": "no"}, "async_scheduling must be true, false or unset"),
        ({"bogus": 3}, "unknown setting bogus; known are .*max_model_len"),
        ({"enable_lora": 1}, "enable_lora must be true or false"),
        ({"max_loras": 0}, "max_loras must be a whole number of at least 1"),
        ({"max_lora_rank": 513}, "max_lora_rank must be at most 512"),
        ({"max_loras": 4, "max_cpu_loras": 3}, "max_cpu_loras must be a whole number of at least 4"),
        ({"model": "a", "model_path": "b"}, "model_path and model are one setting"),
        ({"shard_timeout_s": True}, "shard_timeout_s must be a number of seconds above 0, got True"),
        ({"shard_timeout_s": float("inf")}, "shard_timeout_s must be a number of seconds above 0, got inf"),
        ({"shard_timeout_s": float("nan")}, "shard_timeout_s must be a number of seconds above 0, got nan"),
        ({"gpu_memory_utilization": True}, "gpu_memory_utilization must be above 0 and at most 1, got True"),
        ({"swap_space": True}, "swap_space must be a number of GiB"),
        ({"async_scheduling": 1}, "async_scheduling must be true, false or unset, got 1"),
        ({"quantization": "int8", "dtype": "bfloat16"}, "int8 is for a CPU and float32 .* dtype is bfloat16"),
        ({"quantization": "int8", "device": "cuda"}, "int8 is for a CPU and float32 .* device is cuda"),
        ({"compilation": True, "device": "cpu"}, "compilation is for a GPU"),
        ({"compilation": True, "tensor_parallel_size": 2}, "compilation is for a model on one GPU"),
        ({"compilation": True, "enable_lora": True}, "compilation and enable_lora cannot be had together"),
    ],
)
def test_a_bad_setting_is_an_error_that_names_it(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_kwargs(**settings)


def test_a_misspelt_setting_is_told_with_the_one_that_was_meant() -> None:
    with pytest.raises(ConfigError, match=r"^unknown setting max_modl_len \(did you mean max_model_len\?\)$"):
        EngineConfig.from_kwargs(max_modl_len=3)


def test_model_path_is_another_name_of_model() -> None:
    assert EngineConfig.from_kwargs(model_path="here").model == "here"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", "1"),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", 1.5),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("seed", 2**63),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop_token_ids", [-1]),
    ],
)
def test_a_bad_sampling_parameter_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=field) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field


def test_spellings_of_all_and_one() -> None:
    params = SamplingParams(top_k=-1, stop="end", temperature=1e-6)
    assert params.top_k == 0
    assert params.stop_strings == ("end",)
    assert params.greedy
    assert not SamplingParams(temperature=1e-4).greedy
