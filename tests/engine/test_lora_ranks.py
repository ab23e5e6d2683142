"""Adapters of a model that several ranks share: what each merged model gives, and of a matrix a rank's part alone."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engine.engine import Engine
from engine.lora.request import LoRARequest
from engine.outputs import EngineStats
from engine.sampling_params import SamplingParams
from tests import reference, tiny_families
from tests.engine.sharded import Case, run_cases
from tests.engine.test_lora import PROMPTS, Models, submit
from tests.scripted import drain
from tests.tiny_adapters import merge, write_adapter

NAMES = (None, "one", "two")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("lora"))


def mixed(engine: Engine, models: Models) -> tuple[dict[str, list[int]], EngineStats]:
    tokens: dict[str, list[int]] = {}
    for turn in range(2):
        for name in NAMES:
            for i in range(len(PROMPTS)):
                submit(engine, models, name, i, f"{name}/{i}/{turn}")
        tokens |= drain(engine)
    return tokens, engine.stats()


CONDITIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunked": {"max_num_batched_tokens": 11},
    "a pool that preempts": {"num_gpu_blocks_override": 9, "max_model_len": 120},
    "one slot": {"max_loras": 1},
    "two in flight": {"async_scheduling": True},
}


def test_two_ranks_give_what_each_merged_model_gives(models: Models) -> None:
    cases = [
        Case(models.base, partial(mixed, models=models), {"enable_lora": True, **settings})
        for settings in CONDITIONS.values()
    ]
    for condition, (tokens, stats) in zip(CONDITIONS, run_cases(2, cases), strict=True):
        for name in NAMES:
            for i in range(len(PROMPTS)):
                for turn in range(2):
                    assert tokens[f"{name}/{i}/{turn}"] == models.expected[name, i], (condition, name, i)
        assert stats.adapter_loads == 2 or condition == "one slot"
        assert stats.preemptions or "preempts" not in condition


def adapted(engine: Engine, folder: Path) -> tuple[list[int], list[tuple[int, ...]]]:
    """One request's tokens, and the shapes of A and B in the first layer."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    adapter = engine.load_adapter(LoRARequest("a", 1, str(folder)))
    engine.add_request("a", PROMPTS[0], params, adapter=adapter)
    attention = engine.runner.model.layers[0].attention
    shapes = [tuple(w.shape[1:]) for layer in (attention.qkv, attention.output) for w in (layer.lora.a, layer.lora.b)]
    return drain(engine)["a"], shapes


def test_projections_that_are_stored_as_one_matrix(tmp_path: Path) -> None:
    base = tiny_families.write("phi3", tmp_path / "base")
    adapter = write_adapter(tmp_path / "adapter", base, targets=("qkv_proj", "o_proj", "gate_up_proj", "down_proj"))
    merged = merge(tmp_path / "merged", base, adapter)
    case = Case(base, partial(adapted, folder=adapter), {"enable_lora": True})
    (tokens, shapes), (_, whole) = (run_cases(size, [case])[0] for size in (2, 1))
    assert tokens == reference.greedy(merged, PROMPTS[0], 12)
    (a_rows, a_columns), (b_rows, b_columns) = whole[:2]
    assert shapes[:2] == [(a_rows, a_columns), (b_rows, b_columns // 2)]
    (a_rows, a_columns), b = whole[2:]
    assert shapes[2:] == [(a_rows // 2, a_columns), b]
