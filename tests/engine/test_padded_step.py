"""Decode steps on static buffers: padding changes nothing, replays equal plain steps, and the host never waits.

On the CPU `tests.fake_cuda` stands for the GPU; its graphs replay recorded operators on the same memory.
"""

import itertools
from pathlib import Path

import pytest
import torch

from engine.device.padded_step import is_decode, padded_sizes
from engine.engine import Engine
from engine.model_runner import ModelRunner
from engine.sampling_params import SamplingParams
from engine.step import StepPlan
from tests import tiny_families, tiny_models
from tests.engine.build import build_engine
from tests.fake_cuda import FakeCuda, no_look_at_the_device
from tests.scripted import LateRunner, drain

PROMPTS = [[(3 + 5 * i + 11 * j) % 380 + 3 for j in range(length)] for i, length in enumerate((1, 15, 16, 17, 33))]

GREEDY = {"temperature": 0.0}
PLAIN = {"temperature": 0.9}
FULL = {"temperature": 0.9, "top_p": 0.8, "top_k": 20}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.llama(tmp_path_factory.mktemp("models") / "llama")


def runner_on(folder: Path, cuda: FakeCuda, *, capture: bool, **settings: object) -> ModelRunner:
    plain = build_engine(folder, **settings).runner
    assert isinstance(plain, ModelRunner)
    backend = plain.model.layers[0].attention.backend
    runner = ModelRunner(plain.model, backend, plain.info, dtype=plain.dtype, device=plain.device, cuda=cuda)
    runner.pad_decodes(capture=capture)
    return runner


def add(engine: Engine, num_prompts: int = len(PROMPTS), max_tokens: int = 20, **params: object) -> None:
    for i, prompt in enumerate(PROMPTS[:num_prompts]):
        settings = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=i, **params)
        engine.add_request(str(i), prompt, settings)


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, [1]),
        (3, [1, 2, 3]),
        (5, [1, 2, 4, 5]),
        (8, [1, 2, 4, 8]),
        (20, [1, 2, 4, 8, 16, 20]),
        (37, [1, 2, 4, 8, 16, 24, 32, 37]),
        (256, [1, 2, 4, *range(8, 257, 8)]),
    ],
)
def test_sizes_reach_any_number_of_sequences(most: int, sizes: list[int]) -> None:
    assert padded_sizes(most) == sizes


@pytest.mark.parametrize("most", [100, 700, 1024, 5000])
def test_little_is_padding(most: int) -> None:
    sizes = padded_sizes(most)
    assert sizes[-1] == most
    assert all(b - a <= max(8, b / 32 + 1) for a, b in itertools.pairwise(sizes))


@pytest.mark.parametrize("params", [GREEDY, PLAIN, FULL], ids=["greedy", "plain", "full"])
def test_padding_changes_no_bit(folder: Path, params: dict[str, float]) -> None:
    states: dict[int, list[tuple[torch.Tensor, ...]]] = {}
    caches = {}
    for most in (5, 24):  # five sequences fill one batch, and are padded to eight in the other
        runner = runner_on(folder, FakeCuda(), capture=False, max_num_seqs=most, num_gpu_blocks_override=32)
        engine = Engine(runner)
        add(engine, **params)
        padded = runner.padded
        assert padded is not None
        seen = states.setdefault(most, [])
        while engine.has_work():
            engine.step()
            n = engine.scheduler.num_running
            if n == len(PROMPTS):
                seen.append((padded.hidden[:n].clone(), padded.tokens[:n].clone(), runner.rows.last_tokens[:n].clone()))
        caches[most] = runner.caches
    assert len(states[5]) > 10
    for exact, padded_state in zip(states[5], states[24], strict=True):
        for a, b in zip(exact, padded_state, strict=True):
            assert torch.equal(a, b)
    for layer, other in zip(caches[5], caches[24], strict=True):
        assert torch.equal(layer[0], other[0])
        assert torch.equal(layer[1], other[1])


LOADS: dict[str, dict[str, object]] = {
    "greedy": GREEDY,
    "plain": PLAIN,
    "full": FULL,
    "penalties": {**FULL, "repetition_penalty": 1.3, "frequency_penalty": 0.2},
    "min tokens": {**PLAIN, "min_tokens": 12, "stop_token_ids": [7, 8]},
    "biases and logprobs": {**PLAIN, "logit_bias": {5: 4.0, 9: -100.0}, "logprobs": 2, "prompt_logprobs": 1},
    "bad words": {**GREEDY, "bad_words_token_ids": [[3, 4], [11]]},
}


MODES = ("step by step", "two in flight", "late device, a pool that preempts")
REPLAYS = [(load, "two in flight") for load in LOADS] + [
    ("greedy", MODES[0]),
    ("full", MODES[2]),
    ("penalties", MODES[2]),
]


@pytest.mark.parametrize(("load", "mode"), REPLAYS)
def test_replayed_graphs_give_the_tokens_of_plain_steps(folder: Path, load: str, mode: str) -> None:
    params = LOADS[load]
    settings: dict[str, object] = {"max_num_seqs": 7}
    if "preempts" in mode:
        settings |= {"num_gpu_blocks_override": 7, "max_model_len": 120}
    plain = build_engine(folder, **settings)
    add(plain, **params)
    expected = drain(plain)
    runner = runner_on(folder, FakeCuda(), capture=True, **settings)
    engine = Engine(LateRunner(runner) if "late" in mode else runner, async_scheduling=mode != "step by step")
    add(engine, **params)
    assert drain(engine) == expected
    if "preempts" in mode:
        assert engine.stats().preemptions > 0
    # Rows again, with another's leftovers in them, and prompts that the cache holds whole.
    add(engine, **params)
    assert drain(engine) == expected


@pytest.mark.parametrize("most", [5, 20])
def test_any_number_of_sequences_may_be_captured(folder: Path, most: int) -> None:
    def tokens(engine: Engine) -> dict[str, list[int]]:
        for i in range(most):
            engine.add_request(
                str(i), [5 + i, 9, 11], SamplingParams(temperature=0.0, max_tokens=1 + i, ignore_eos=True)
            )
        return drain(engine)

    cuda = FakeCuda()
    runner = runner_on(folder, cuda, capture=True, max_num_seqs=most)
    assert runner.graphs is not None
    assert list(runner.graphs._forward) == padded_sizes(most)[::-1]
    cuda.log.clear()
    assert tokens(Engine(runner)) == tokens(build_engine(folder, max_num_seqs=most))
    assert cuda.log.count("replay") == 2 * (most - 1), "each step but the prompts'"


@pytest.fixture
def experts_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts as one operation over weights in one piece, by its definition; no layer has a form for CPUs."""
    monkeypatch.setattr("engine.layers.linear.packs", lambda *_: False)
    monkeypatch.setattr("kernels.experts.usable", lambda x: True)


@pytest.mark.usefixtures("experts_as_on_a_gpu")
@pytest.mark.parametrize("family", ["qwen3-moe", "qwen3-moe, dense layers", "mixtral"])
def test_a_decode_with_experts_is_replayed_and_waits_for_nothing(tmp_path: Path, family: str) -> None:
    folder = tiny_families.write(family, tmp_path / "experts")
    plain = build_engine(folder, max_num_seqs=7)
    assert not any(layer.mlp.waits for layer in plain.runner.model.layers)
    add(plain, **FULL)
    expected = drain(plain)
    runner = runner_on(folder, FakeCuda(), capture=True, max_num_seqs=7)  # capture looks at nothing
    watched = without_looks(runner)
    engine = Engine(runner, async_scheduling=True)
    add(engine, **FULL)
    assert drain(engine) == expected
    assert len(watched) > 10


@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral"])
def test_experts_as_one_operation_give_the_tokens_of_expert_by_expert(
    tmp_path: Path, family: str, request: pytest.FixtureRequest
) -> None:
    folder = tiny_families.write(family, tmp_path / "experts")
    by_expert = build_engine(folder)
    assert by_expert.runner.model.layers[-1].mlp.waits
    add(by_expert, **GREEDY)
    expected = drain(by_expert)
    request.getfixturevalue("experts_as_on_a_gpu")
    engine = build_engine(folder)
    add(engine, **GREEDY)
    assert drain(engine) == expected


def without_looks(runner: ModelRunner) -> list[StepPlan]:
    """Fail when launching a decode looks at the device; returns the decodes that were launched."""
    launch, watched = runner.launch, []

    def watch(plan: StepPlan) -> object:
        if not is_decode(plan):
            return launch(plan)
        watched.append(plan)
        with no_look_at_the_device():
            return launch(plan)

    runner.launch = watch
    return watched


def test_capture_warms_up_first_and_goes_from_large_to_small(folder: Path) -> None:
    cuda = FakeCuda()
    runner = runner_on(folder, cuda, capture=True, max_num_seqs=3)
    assert runner.graphs is not None
    assert runner.graphs.num_graphs == 3 * 4, "a forward and three kinds of sampling for each of 1, 2, 3"
    one = ["stream 2 waits for compute", "synchronize", "capture"]
    assert [entry for entry in cuda.log if entry != "record"] == one * 12
    forward = runner.graphs._forward
    assert list(forward) == [3, 2, 1]


def test_a_decode_step_is_two_replays_and_waits_for_nothing(folder: Path) -> None:
    cuda = FakeCuda()
    runner = runner_on(folder, cuda, capture=True, max_num_seqs=6)
    engine = Engine(runner, async_scheduling=True)
    add(engine, max_tokens=40, **FULL)
    launch, waits = runner.launch, []

    def watched(plan: StepPlan) -> object:
        cuda.log.clear()
        if not is_decode(plan):
            return launch(plan)
        with no_look_at_the_device():
            ticket = launch(plan)
        waits.append([entry for entry in cuda.log if "synchronize" in entry])
        assert cuda.log.count("replay") == 2
        # The copy stream waits for the samples, and the next sampling for the copy: on the device, both.
        assert "stream 1 waits for compute" in cuda.log
        return ticket

    runner.launch = watched
    drain(engine)
    assert len(waits) > 20
    assert not any(waits)


def test_a_batch_that_filters_without_a_graph_would_look_at_the_device(folder: Path) -> None:
    """The check itself: what it must find is found."""
    runner = runner_on(folder, FakeCuda(), capture=False, max_num_seqs=2)
    logits = torch.randn(2, 384)
    assert runner.padded is not None
    with pytest.raises(AssertionError, match="wait for the device"), no_look_at_the_device():
        logits[logits > 0] = 0
    with pytest.raises(AssertionError, match="looks at a tensor"), no_look_at_the_device():
        logits.tolist()


def test_close_frees_the_graphs(folder: Path) -> None:
    cuda = FakeCuda()
    runner = runner_on(folder, cuda, capture=True, max_num_seqs=2)
    runner.close()
    runner.close()
    assert cuda.log.count("reset") == 8
    assert runner.graphs is None
    assert runner.padded is None
