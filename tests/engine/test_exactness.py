"""The engine against transformers in float32: logits, greedy tokens, and the same tokens under every condition."""

from pathlib import Path

import pytest
import torch

from engine.engine import Engine
from engine.model_runner import ModelRunner
from engine.sampling_params import SamplingParams
from engine.step import StepPlan
from tests import reference, tiny_models
from tests.engine.build import OVERLAPPED, build_engine
from tests.scripted import LateRunner, drain

MODELS = ("llama", "llama_tied", "qwen3")
PROMPTS = [[(3 + 5 * i + 11 * j) % 380 + 3 for j in range(length)] for i, length in enumerate((1, 15, 16, 17, 33, 50))]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "llama": tiny_models.llama(root / "llama"),
        "llama_tied": tiny_models.llama(root / "llama_tied", tie_word_embeddings=True, seed=4),
        "qwen3": tiny_models.qwen3(root / "qwen3"),
    }


@pytest.fixture(params=MODELS)
def folder(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Path:
    return folders[request.param]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def logits_of(engine: Engine) -> list[torch.Tensor]:
    """Collects every row of logits that the engine's model makes from now on."""
    assert isinstance(engine.runner, ModelRunner)
    seen: list[torch.Tensor] = []
    model = engine.runner.model
    original = model.logits

    def record(hidden: torch.Tensor) -> torch.Tensor:
        result = original(hidden)
        seen.extend(result.clone())
        return result

    model.logits = record
    return seen


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
@pytest.mark.parametrize("attention", ["cpu", "torch"])
def test_logits_equal_transformers(folder: Path, prompt: list[int], attention: str) -> None:
    engine = build_engine(folder, attention=attention, max_num_batched_tokens=16)
    seen = logits_of(engine)
    engine.add_request("a", prompt, greedy(4))
    tokens = drain(engine)["a"]
    truth = reference.logits(folder, [*prompt, *tokens])
    for i, row in enumerate(seen):
        torch.testing.assert_close(row, truth[len(prompt) - 1 + i], atol=1e-4, rtol=0)
    assert len(seen) == 4


def test_greedy_tokens_equal_transformers_over_64_steps(folder: Path) -> None:
    engine = build_engine(folder)
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(str(i), prompt, greedy(64))
    results = drain(engine)
    for i, prompt in enumerate(PROMPTS):
        assert results[str(i)] == reference.greedy(folder, prompt, 64)


CONDITIONS = {
    "alone": {},
    "chunks of 3": {"max_num_batched_tokens": 3},
    "chunks of 16": {"max_num_batched_tokens": 16},
    "no chunks": {"enable_chunked_prefill": False},
    "no prefix cache": {"enable_prefix_caching": False},
    "a pool that preempts": {"num_gpu_blocks_override": 9, "max_model_len": 120},
    "blocks of 32": {"block_size": 32},
    **OVERLAPPED,
}


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "seeded"])
def test_the_same_tokens_under_every_condition(folders: dict[str, Path], condition: str, sampled: bool) -> None:
    folder = folders["llama"]
    if sampled:
        params = [SamplingParams(temperature=0.8, top_p=0.9, seed=i, max_tokens=40, ignore_eos=True) for i in range(6)]
    else:
        params = [greedy(40)] * 6
    alone = build_engine(folder)
    expected = {}
    for i, prompt in enumerate(PROMPTS):
        alone.add_request(str(i), prompt, params[i])
        expected |= drain(alone)
    if not sampled:
        assert expected["3"] == reference.greedy(folder, PROMPTS[3], 40)
    engine = build_engine(folder, **CONDITIONS[condition])
    if "late" in condition:
        engine.runner = LateRunner(engine.runner)
    for attempt in ("cold", "warm"):
        for i, prompt in enumerate(PROMPTS):
            engine.add_request(f"{attempt} {i}", prompt, params[i])
    results = drain(engine)
    for attempt in ("cold", "warm"):
        for i in range(len(PROMPTS)):
            assert results[f"{attempt} {i}"] == expected[str(i)]
    if "preempts" in condition:
        assert engine.stats().preemptions > 0
    assert engine.stats().live_blocks == 0


def test_seeds_choose_the_tokens_and_neighbours_do_not(folders: dict[str, Path]) -> None:
    engine = build_engine(folders["llama"])

    def run(name: str, seed: int | None, prompt: list[int] = PROMPTS[2]) -> None:
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=20, ignore_eos=True)
        engine.add_request(name, prompt, params)

    run("alone", 42)
    run("zero", 0)
    alone = drain(engine)
    run("first", 42)
    run("unseeded", None)
    run("second", 42)
    run("zero", 0)
    run("other", None, PROMPTS[4])
    together = drain(engine)
    assert together["first"] == together["second"] == alone["alone"]
    assert together["zero"] == alone["zero"], "0 is a seed"
    assert together["unseeded"] != alone["alone"]
    assert alone["zero"] != alone["alone"]


def test_temperatures_close_to_zero_are_greedy(folders: dict[str, Path]) -> None:
    engine = build_engine(folders["llama"])
    expected = reference.greedy(folders["llama"], PROMPTS[1], 12)
    for name, more in {
        "0": {},
        "1e-6": {"temperature": 1e-6},
        "1e-4": {"temperature": 1e-4},
        "p": {"top_p": 0.5},
    }.items():
        engine.add_request(
            name, PROMPTS[1], SamplingParams(**({"temperature": 0.0} | more), max_tokens=12, ignore_eos=True)
        )
    engine.add_request("random", PROMPTS[1], SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True))
    results = drain(engine)
    for name in ("0", "1e-6", "1e-4", "p"):
        assert results[name] == expected


def test_random_weights_depend_on_the_seed_alone(folders: dict[str, Path]) -> None:
    def tokens(seed: int) -> list[int]:
        engine = build_engine(folders["llama"], load_format="dummy", seed=seed)
        engine.add_request("a", PROMPTS[4], greedy(8))
        return drain(engine)["a"]

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)


def test_a_plan_without_samples_makes_no_logits(folders: dict[str, Path]) -> None:
    engine = build_engine(folders["llama"], max_num_batched_tokens=16)
    seen = logits_of(engine)
    plans: list[StepPlan] = []
    launch = engine.runner.launch
    engine.runner.launch = lambda plan: (plans.append(plan), launch(plan))[1]
    engine.add_request("a", PROMPTS[5], greedy(1))
    engine.step()
    assert len(plans[0].sample) == 0
    assert seen == []
    drain(engine)
    assert len(seen) == 1
