"""Models that several ranks share: the same tokens, logits and log probabilities as on one."""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.engine import Engine
from engine.sampling_params import SamplingParams
from tests import reference, tiny_families
from tests.engine.sharded import Case, run_cases
from tests.engine.test_logprobs import Seen

PROMPTS = [[(7 + 5 * i + 11 * j) % 380 + 3 for j in range(length)] for i, length in enumerate((9, 50, 33, 17))]


@dataclasses.dataclass
class Result:
    """tokens by request; logits: of each sampled token, in the order of sampling."""

    tokens: dict[str, list[int]]
    logits: torch.Tensor
    seen: Seen
    stats: Any


def greedy(max_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **more)


def serve(engine: Engine, params: list[SamplingParams], rounds: int = 1) -> Result:
    """All prompts together, and all again, as often as `rounds` says."""
    rows: list[torch.Tensor] = []
    model, original = engine.runner.model, engine.runner.model.logits

    def record(hidden: torch.Tensor) -> torch.Tensor:
        result = original(hidden)
        rows.extend(result.clone())
        return result

    model.logits = record
    for attempt in range(rounds):
        for i, prompt in enumerate(PROMPTS):
            engine.add_request(f"{attempt} {i}", prompt, params[i % len(params)])
    seen = Seen(engine)
    return Result(seen.tokens, torch.stack(rows), seen, engine.stats())


def compare(result: Result, expected: Result) -> None:
    """Not by bits: a matrix product of fewer columns is added up elsewhere."""
    best = expected.logits.topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > reference.MIN_GAP, "a close call: choose another prompt"
    torch.testing.assert_close(result.logits, expected.logits, atol=1e-4, rtol=0)
    assert result.tokens == expected.tokens


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: tiny_families.write(name, root / name) for name in tiny_families.CASES}


def test_families_on_two_ranks(folders: dict[str, Path]) -> None:
    cases = [Case(folder, partial(serve, params=[greedy(12)])) for folder in folders.values()]
    for result, expected in zip(run_cases(2, cases), run_cases(1, cases), strict=True):
        compare(result, expected)
