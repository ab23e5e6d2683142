"""Every family against transformers in float32, and in int8 against itself."""

from pathlib import Path

import pytest
import torch

from engine.models.families import FAMILIES
from tests import reference, tiny_families
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


def test_int8_stays_near(folder: Path) -> None:
    rows = []
    for quantization in (None, "int8"):
        engine = build_engine(folder, quantization=quantization)
        seen = logits_of(engine)
        engine.add_request("a", PROMPTS[1], greedy(1))
        drain(engine)
        rows.append(seen[0])
    exact, near = rows
    assert 1e-4 < (near - exact).norm() / exact.norm() < 0.15
