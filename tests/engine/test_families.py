"""Every family against transformers in float32, and in int8 against itself."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.models.families import FAMILIES
from tests import models_page, reference, tiny_families
from tests.engine.build import build_engine
from tests.engine.test_exactness import greedy, logits_of
from tests.scripted import drain

PROMPTS = [[(7 + 5 * i + 11 * j) % 380 + 3 for j in range(length)] for i, length in enumerate((9, 50))]


@pytest.fixture(params=tiny_families.CASES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tiny_families.write(request.param, tmp_path / "model")


def test_every_family_has_a_case() -> None:
    assert {f"{family}ForCausalLM" for family, _ in tiny_families.CASES.values()} == set(FAMILIES)


def test_logits_and_64_greedy_tokens_equal_transformers_in_chunks_and_from_the_prefix_cache(folder: Path) -> None:
    engine = build_engine(folder, max_num_batched_tokens=16)
    seen = logits_of(engine)
    for i, prompt in enumerate(PROMPTS):
        engine.add_request("alone", prompt, greedy(64))
        tokens = drain(engine)["alone"]
        assert tokens == reference.greedy(folder, prompt, 64)
        truth = reference.logits(folder, [*prompt, *tokens])[len(prompt) - 1 : -1]
        torch.testing.assert_close(torch.stack(seen), truth, atol=1e-4, rtol=0)
        seen.clear()
        for name in ("again", "beside"):
            engine.add_request(name, prompt, greedy(64))
        assert drain(engine) == {"again": tokens, "beside": tokens}
        assert i == 0 or engine.stats().cached_prompt_tokens > 0
        seen.clear()


def first_logits(folder: Path, **settings: object) -> torch.Tensor:
    engine = build_engine(folder, **settings)
    seen = logits_of(engine)
    engine.add_request("a", PROMPTS[1], greedy(1))
    drain(engine)
    return seen[0]


def test_int8_stays_near(folder: Path) -> None:
    exact, near = (first_logits(folder, quantization=quantization) for quantization in (None, "int8"))
    assert 1e-4 < (near - exact).norm() / exact.norm() < 0.15


def test_the_page_of_models_is_up_to_date() -> None:
    assert models_page.PAGE.read_text(encoding="utf-8") == models_page.page(), "python -m tests.models_page --write"


def test_the_weights_of_a_text_part_are_found_and_other_parts_are_left(tmp_path: Path) -> None:
    folder = tiny_families.write("gemma3", tmp_path / "text")
    expected = first_logits(folder)
    config = json.loads((folder / "config.json").read_text())
    # Copies: what is loaded is a view of the file, which is written anew.
    weights = {name: weight.clone() for name, weight in load_file(folder / "model.safetensors").items()}
    for prefix, head in (("language_model.model.", "language_model.lm_head."), ("model.language_model.", "lm_head.")):
        renamed = {
            name.replace("model.", prefix, 1) if name.startswith("model.") else name.replace("lm_head.", head): weight
            for name, weight in weights.items()
        }
        renamed |= {f"{part}.weight": torch.ones(2) for part in ("vision_tower.a", "model.multi_modal_projector.b")}
        renamed["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
        save_file(renamed, folder / "model.safetensors")
        whole = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": config, "model_type": "gemma3"}
        (folder / "config.json").write_text(json.dumps(whole))
        assert torch.equal(first_logits(folder), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_weights_in_shards_give_the_logits_of_the_same_numbers_in_float32(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    folder = tiny_families.write("qwen2", tmp_path / "narrow")
    weights = {name: weight.to(dtype) for name, weight in load_file(folder / "model.safetensors").items()}
    save_file({name: weight.float() for name, weight in weights.items()}, folder / "model.safetensors")
    expected = first_logits(folder)
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    files = {name: f"part-{i % 3}.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: weights[name] for name in names if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert torch.equal(first_logits(folder), expected)
