"""Memory: the sums, the step that is measured, and what happens when there is not enough."""

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.device.memory import BYTES_PER_GRAPH, GIB, GpuMemory, num_kv_blocks
from engine.device.trial import measure_memory, trial_plan
from engine.engine import Engine
from engine.errors import ConfigError
from engine.model_runner import ModelRunner
from engine.outputs import FinishReason
from engine.runner import RunnerInfo
from engine.sampling_params import SamplingParams
from tests import tiny_models
from tests.engine.build import build_engine
from tests.scripted import drain, runner_info

GPU = GpuMemory(total=8 * GIB, free=6 * GIB, step=GIB, decode=GIB // 4)


def blocks(gpu: GpuMemory | None, num_graphs: int, bytes_per_block: int = GIB // 64, **settings: object) -> int:
    return num_kv_blocks(EngineConfig.from_kwargs(**settings), gpu, num_graphs, bytes_per_block)


def test_the_cache_gets_what_weights_step_and_graphs_leave() -> None:
    # 7.2 GiB may be used; 2 are, a step takes 1, and the graphs a quarter and 2 MiB each.
    assert blocks(GPU, 0) == int(4.2 * 64)
    assert blocks(GPU, 64) == int((4.2 - 0.25 - 64 / 512) * 64)
    assert GPU.graphs(64) == GIB // 4 + 64 * BYTES_PER_GRAPH
    assert GPU.graphs(0) == 0
    assert blocks(GPU, 0, gpu_memory_utilization=1.0) == 5 * 64


def test_settings_of_the_cache_go_before_the_share() -> None:
    assert blocks(GPU, 64, kv_cache_memory_bytes=GIB) == 64
    assert blocks(GPU, 64, kv_cache_memory_bytes=GIB, num_gpu_blocks_override=3) == 3


def test_what_does_not_fit_is_told_with_numbers_and_settings() -> None:
    with pytest.raises(ConfigError) as error:
        blocks(GPU, 140, gpu_memory_utilization=0.4)
    text = str(error.value)
    for part in (
        "of 8.00 GiB gpu_memory_utilization 0.4",
        "2.00 GiB in use",
        "1.00 for a step",
        "0.52 for 140 CUDA graphs",
        "leaves -0.32 GiB",
        "raise gpu_memory_utilization, lower max_num_batched_tokens or max_num_seqs, or set enforce_eager",
    ):
        assert part in text
    with pytest.raises(ConfigError, match=r"one block takes 0\.0156 GiB; raise kv_cache_memory_bytes"):
        blocks(None, 0, kv_cache_memory_bytes=1000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.mark.parametrize(
    ("info", "num_tokens", "counts"),
    [
        (runner_info(max_num_seqs=3), 16, [6, 5, 5]),
        (runner_info(max_num_seqs=8), 4, [1, 1, 1, 1]),
        (runner_info(max_num_seqs=1, max_model_len=10), 16, [10]),
    ],
)
def test_a_trial_has_all_tokens_and_sequences_there_can_be(
    info: RunnerInfo, num_tokens: int, counts: list[int]
) -> None:
    plan = trial_plan(info, num_tokens)
    assert plan.seq_lens.tolist() == counts
    assert np.diff(plan.query_start).tolist() == counts
    assert plan.positions.tolist() == [i for count in counts for i in range(count)]
    assert len(plan.sample) == len(counts)


class Allocator:
    """`torch.cuda`'s memory figures as a step of `per_token` bytes a token would leave them."""

    def __init__(self) -> None:
        self.held = 5 * GIB
        self.peak = 0

    def synchronize(self, device: object) -> None:
        pass

    empty_cache = reset_peak_memory_stats = lambda self, device=None: None

    def memory_reserved(self, device: object) -> int:
        return self.held

    def max_memory_reserved(self, device: object) -> int:
        return self.held + self.peak

    def mem_get_info(self, device: object) -> tuple[int, int]:
        return 3 * GIB, 8 * GIB


def test_the_largest_step_is_measured_on_the_model_and_writes_nothing(folder: Path) -> None:
    engine = build_engine(folder, max_num_seqs=5, max_num_batched_tokens=48, num_gpu_blocks_override=1)
    runner = engine.runner
    assert isinstance(runner, ModelRunner)
    allocator, launch, sizes = Allocator(), runner.launch, []

    def watched(plan: object) -> object:
        sizes.append(plan.num_tokens)
        allocator.peak = 1000 * plan.num_tokens
        return launch(plan)

    runner.launch = watched
    memory = measure_memory(runner, runner.info, torch.device("cpu"), allocator)
    assert sizes == [48, 5]
    assert memory == GpuMemory(total=8 * GIB, free=3 * GIB, step=48_000, decode=5_000)
    assert all(not cache.any() for layer in runner.caches for cache in layer)


def test_out_of_memory_fails_one_step_and_not_the_engine(folder: Path) -> None:
    engine = build_engine(folder, async_scheduling=True, max_num_seqs=2)
    assert isinstance(engine.runner, ModelRunner)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    for name in ("a", "b", "later"):
        engine.add_request(name, [5, 6, 7], params)
    engine.step()
    forward = engine.runner.model.forward

    def fail(*_: object) -> None:
        engine.runner.model.forward = forward
        raise torch.OutOfMemoryError("CUDA out of memory")

    engine.runner.model.forward = fail
    ended = []
    while engine.has_work():
        ended += engine.step().finished
    reasons = {finished.request_id: (finished.reason, finished.error) for finished in ended}
    assert reasons["a"] == reasons["b"] == (FinishReason.ERROR, "OutOfMemoryError in a step of the engine")
    assert reasons["later"] == (FinishReason.LENGTH, None)
    engine.add_request("next", [5, 6, 7], params)
    assert len(drain(engine)["next"]) == 6


def test_the_engine_survives_as_many_failures_as_are_apart(folder: Path) -> None:
    engine: Engine = build_engine(folder)
    forward = engine.runner.model.forward
    for i in range(5):
        engine.runner.model.forward = lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("no room"))
        engine.add_request(f"fails {i}", [5, 6, 7], SamplingParams(max_tokens=2))
        assert engine.step().finished[0].reason is FinishReason.ERROR
        engine.runner.model.forward = forward
        engine.add_request(f"goes {i}", [5, 6, 7], SamplingParams(max_tokens=2, ignore_eos=True))
        assert len(drain(engine)[f"goes {i}"]) == 2
