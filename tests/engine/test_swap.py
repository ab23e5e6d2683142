"""Preempted requests go to host memory and come back: the tokens are those of a pool that never preempts."""

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.device.block_copies import HostBlocks
from engine.device.pinned import PinnedUpload
from engine.engine import Engine
from engine.errors import ConfigError
from engine.model_runner import ModelRunner
from engine.runner import SwapInfo
from engine.sampling_params import SamplingParams
from engine.step import BlockCopies, StepPlan
from tests import tiny_models
from tests.engine.build import build_engine
from tests.fake_cuda import FakeCuda
from tests.scripted import LateRunner, ShadowRunner, drain, shadow_continuation, swap_info

VOCAB = 384
MODES = ("step by step", "two in flight", "late device")


def tokens(n: int, start: int = 0) -> list[int]:
    return [(start + i * 7) % VOCAB for i in range(n)]


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens)


def shadow_engine(mode: str, runner: ShadowRunner, caching: bool = True) -> Engine:
    return Engine(
        LateRunner(runner) if mode == "late device" else runner,
        enable_prefix_caching=caching,
        async_scheduling=mode != "step by step",
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("caching", [True, False], ids=["prefix cache", "no prefix cache"])
@pytest.mark.parametrize("host_blocks", [2, 5, 100])
def test_swapped_requests_give_the_tokens_of_a_big_pool(mode: str, caching: bool, host_blocks: int) -> None:
    runner = ShadowRunner(num_blocks=10, eos_token_ids=(), swap=swap_info(host_blocks))
    engine = shadow_engine(mode, runner, caching)
    for i in range(6):
        engine.add_request(str(i), tokens(5 + i, i * 31), params(16))
    results = drain(engine)
    for i in range(6):
        assert results[str(i)] == shadow_continuation(tokens(5 + i, i * 31), 16, VOCAB)
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.live_blocks == 0
    if host_blocks > 2:
        assert stats.swap_out_bytes > 0
        assert 0 < stats.swap_in_bytes <= stats.swap_out_bytes
    assert engine.scheduler.swap is not None
    assert engine.scheduler.swap.num_free == host_blocks


def test_a_swapped_request_computes_one_token_when_it_comes_back() -> None:
    runner = ShadowRunner(num_blocks=8, eos_token_ids=(), max_num_seqs=2, swap=swap_info(100))
    engine = shadow_engine("step by step", runner, caching=False)
    plans: list[StepPlan] = []
    launch = runner.launch
    runner.launch = lambda plan: (plans.append(plan), launch(plan))[1]
    engine.add_request("first", tokens(10), params(20))
    engine.add_request("second", tokens(10, 99), params(14))
    results = drain(engine)
    assert results["second"] == shadow_continuation(tokens(10, 99), 14, VOCAB)
    out, back = (plan for plan in plans if plan.copies is not None)
    assert len(out.copies.out_blocks) == 4
    assert len(out.copies.in_blocks) == 0
    assert back.copies.in_host.tolist() == out.copies.out_host.tolist()
    assert back.num_tokens == len(back.rows), "nothing is computed again"
    stats = engine.stats()
    assert stats.swap_out_bytes == stats.swap_in_bytes == 4 * 100


def test_what_the_cache_has_kept_is_not_copied_back() -> None:
    runner = ShadowRunner(num_blocks=8, eos_token_ids=(), max_num_seqs=2, swap=swap_info(100))
    engine = shadow_engine("step by step", runner)
    engine.add_request("first", tokens(12), params(16))
    engine.add_request("second", tokens(12), params(13))  # the same prompt: its blocks are shared
    results = drain(engine)
    assert results["second"] == shadow_continuation(tokens(12), 13, VOCAB)
    stats = engine.stats()
    assert stats.preemptions == 1
    assert stats.swap_in_bytes < stats.swap_out_bytes


def test_what_came_back_is_found_by_others() -> None:
    runner = ShadowRunner(num_blocks=8, eos_token_ids=(), max_num_seqs=2, swap=swap_info(100))
    engine = shadow_engine("step by step", runner)
    engine.add_request("first", tokens(10), params(20))
    engine.add_request("second", tokens(10, 99), params(14))
    drain(engine)
    assert engine.stats().swap_in_bytes > 0
    engine.add_request("again", tokens(10, 99), params(1))
    finished = [f for _ in range(3) if engine.has_work() for f in engine.step().finished]
    assert finished[0].num_cached_tokens == 8


def test_nothing_is_copied_where_computing_again_is_cheaper() -> None:
    swap = swap_info(100, seconds_per_token=0.0)
    engine = shadow_engine("step by step", ShadowRunner(num_blocks=10, eos_token_ids=(), swap=swap))
    for i in range(6):
        engine.add_request(str(i), tokens(5 + i, i * 31), params(16))
    drain(engine)
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.swap_out_bytes == stats.swap_in_bytes == 0


def test_the_cost_model_by_numbers() -> None:
    swap = SwapInfo(num_blocks=4, block_bytes=10, seconds_per_block=1e-3, seconds_per_token=1e-4)
    space = shadow_engine("step by step", ShadowRunner(swap=swap)).scheduler.swap
    assert space is not None
    assert space.is_cheaper(num_blocks=10, num_tokens=201)
    assert not space.is_cheaper(num_blocks=10, num_tokens=200), "out and in: 20 blocks are 20 ms"


@pytest.mark.parametrize("mode", MODES)
def test_an_aborted_request_gives_its_host_blocks_back(mode: str) -> None:
    runner = ShadowRunner(num_blocks=8, eos_token_ids=(), max_num_seqs=2, swap=swap_info(9))
    engine = shadow_engine(mode, runner)
    engine.add_request("first", tokens(10), params(20))
    engine.add_request("second", tokens(10, 99), params(14))
    while engine.scheduler.num_preemptions == 0:
        engine.step()
    assert engine.scheduler.swap is not None
    assert engine.scheduler.swap.num_free == 5
    engine.abort("second")
    assert engine.scheduler.swap.num_free == 9
    assert drain(engine)["first"][-1] == shadow_continuation(tokens(10), 20, VOCAB)[-1]


@pytest.mark.parametrize("mode", MODES)
def test_copies_of_a_step_that_failed_are_not_relied_on(mode: str) -> None:
    runner = ShadowRunner(num_blocks=8, eos_token_ids=(), max_num_seqs=2, swap=swap_info(9))
    engine = shadow_engine(mode, runner, caching=False)
    engine.add_request("first", tokens(10), params(20))
    engine.add_request("second", tokens(10, 99), params(14))
    launch, failed = runner.launch, []

    def fail_once(plan: StepPlan) -> object:
        if plan.copies is not None and not failed:
            failed.append(plan)
            raise RuntimeError("made to fail, and nothing was copied")
        return launch(plan)

    runner.launch = fail_once
    results = drain(engine)
    assert failed
    assert results["second"] == shadow_continuation(tokens(10, 99), 14, VOCAB)
    assert engine.scheduler.swap is not None
    assert engine.scheduler.swap.num_free == 9


PROMPTS = [[(3 + 5 * i + 11 * j) % 380 + 3 for j in range(length)] for i, length in enumerate((1, 15, 16, 17, 33, 50))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.mark.parametrize("overlap", [False, True], ids=["one in flight", "two in flight"])
@pytest.mark.parametrize("settings", [{}, {"kv_cache_dtype": "int8"}, {"enable_prefix_caching": False}], ids=str)
def test_a_model_gives_the_tokens_it_gives_undisturbed(
    folder: Path, overlap: bool, settings: dict[str, object]
) -> None:
    def run(**more: object) -> tuple[dict[str, list[int]], Engine]:
        engine = build_engine(folder, async_scheduling=overlap, **settings, **more)
        for i, prompt in enumerate(PROMPTS):
            sampled = SamplingParams(temperature=0.8, top_p=0.9, seed=i, max_tokens=40, ignore_eos=True)
            engine.add_request(str(i), prompt, sampled)
        return drain(engine), engine

    expected, _ = run()
    got, engine = run(num_gpu_blocks_override=9, max_model_len=120, swap_space=0.001)
    assert got == expected
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.swap_in_bytes > 0
    swap = engine.runner.info.swap
    assert swap is not None
    assert stats.swap_out_bytes % swap.block_bytes == 0
    engine.close()


def test_copies_run_on_a_stream_between_the_steps_and_the_host_does_not_wait(folder: Path) -> None:
    runner = build_engine(folder, num_gpu_blocks_override=4).runner
    assert isinstance(runner, ModelRunner)
    for layer in runner.caches:
        for cache in layer:
            cache.copy_(torch.randn_like(cache))
    before = [[cache.clone() for cache in layer] for layer in runner.caches]
    cuda = FakeCuda()
    host = HostBlocks(runner.caches, 6, PinnedUpload(torch.device("cpu"), cuda), cuda)
    none = np.empty(0, dtype=np.int32)
    host.copy(BlockCopies(np.int32([2, 0, 3]), np.int32([4, 5, 1]), none, none))
    for layer in runner.caches:
        for cache in layer:
            cache.zero_()
    cuda.log.clear()
    host.copy(BlockCopies(none, none, np.int32([1, 3, 2]), np.int32([1, 4, 5])))
    assert cuda.log == ["stream 1 waits for compute", "compute waits for stream 1"]
    for layer, old in zip(runner.caches, before, strict=True):
        for cache, was in zip(layer, old, strict=True):
            assert torch.equal(cache[1], was[3])
            assert torch.equal(cache[3], was[2])
            assert torch.equal(cache[2], was[0])
            assert not cache[0].any()
    host.close()
    host.close()
    assert cuda.log[-1] == "unpinned"


def test_too_little_host_memory_is_told(folder: Path) -> None:
    with pytest.raises(ConfigError, match="swap_space holds no block"):
        build_engine(folder, swap_space=1e-6)
    with pytest.raises(ConfigError, match=r"swap_space of \d+\.\d GiB cannot be allocated: lower it"):
        build_engine(folder, swap_space=1e9)
    with pytest.raises(ConfigError, match="swap_space must be a number of GiB"):
        build_engine(folder, swap_space=-1)
