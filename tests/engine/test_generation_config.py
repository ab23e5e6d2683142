from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.hf.generation_config import default_sampling
from engine.llm import LLM
from tests import tiny_models


def write(folder: Path, text: str) -> Path:
    (folder / "generation_config.json").write_text(text)
    return folder


def test_the_file_says_how_to_sample_unless_the_setting_leaves_it_unread(tmp_path: Path) -> None:
    write(
        tmp_path,
        '{"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": null, "max_new_tokens": 5, "eos_token_id": 2}',
    )
    assert default_sampling(tmp_path, "auto") == {"temperature": 0.7, "top_p": 0.8, "top_k": 20}
    assert default_sampling(tmp_path, "vllm") == {}
    assert default_sampling(tmp_path / "absent", "auto") == {}
    assert default_sampling(tmp_path / "m.gguf", "auto") == {}


@pytest.mark.parametrize(("text", "message"), [('{"top_p": 2}', "top_p"), ('{"temperature": "hot"}', "temperature")])
def test_a_value_that_cannot_be_names_the_file_and_the_way_out(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"generation_config\.json: .*{message}.*set generation_config to vllm"):
        default_sampling(write(tmp_path, text), "auto")


def test_prompts_without_parameters_are_sampled_by_the_file(tmp_path: Path) -> None:
    folder = write(tiny_models.llama(tmp_path / "model"), '{"temperature": 0.0, "eos_token_id": 2}')
    settings = {"device": "cpu", "dtype": "float32", "num_gpu_blocks_override": 32}
    llm = LLM(folder, **settings)
    greedy = [llm.generate([[5, 6, 7]], use_tqdm=False)[0].outputs[0].token_ids for _ in range(3)]
    assert greedy[0] == greedy[1] == greedy[2]
    unread = LLM(folder, **settings, generation_config="vllm")
    assert any(unread.generate([[5, 6, 7]], use_tqdm=False)[0].outputs[0].token_ids != greedy[0] for _ in range(5))


def test_another_value_of_the_setting_is_refused() -> None:
    with pytest.raises(ConfigError, match="generation_config must be one of auto, vllm, got"):
        EngineConfig.from_kwargs(generation_config="none")
