"""The steps that are run at the start on a GPU, here on the CPU: they go every way, and leave nothing behind."""

from pathlib import Path

import numpy as np
import pytest

from engine import sampler
from engine.device.trial import warm_up_plans
from engine.model_runner import ModelRunner
from engine.runner import RunnerInfo
from engine.sampling_params import SamplingParams
from engine.step import SamplingMode, StepPlan
from tests import tiny_models
from tests.engine.build import build_engine
from tests.scripted import drain, runner_info


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.llama(tmp_path_factory.mktemp("models") / "llama")


def test_every_mode_runs_on_decodes_and_prompts() -> None:
    plans = list(warm_up_plans(runner_info(max_num_batched_tokens=64)))
    plain = {(plan.num_tokens, plan.mode) for plan in plans if plan.extras is None}
    assert plain == {(tokens, mode) for tokens in (1, 2, 64) for mode in SamplingMode}
    assert all((plan.slots == -1).all() for plan in plans)


@pytest.mark.parametrize(
    "info",
    [
        runner_info(max_num_seqs=1, max_num_batched_tokens=1, max_model_len=2),
        runner_info(max_num_seqs=1, max_num_batched_tokens=64, max_model_len=40),
        runner_info(max_num_seqs=64, max_num_batched_tokens=512, max_model_len=3000),
        runner_info(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=40, max_loras=2),
    ],
)
def test_no_step_is_larger_or_longer_than_there_can_be(info: RunnerInfo) -> None:
    for plan in warm_up_plans(info):
        assert plan.num_tokens <= info.max_num_batched_tokens
        assert len(plan.rows) <= info.max_num_seqs
        assert (plan.positions < info.max_model_len).all()
        assert (plan.positions[plan.query_start[1:] - 1] == plan.seq_lens - 1).all()


def test_all_ways_through_the_sampler_are_taken_and_nothing_stays(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=8, seed=3, presence_penalty=1.0, logit_bias={7: 2.0}, ignore_eos=True)
    settings = {"max_num_seqs": 2, "max_num_batched_tokens": 64, "max_model_len": 512}
    tokens = {}
    taken: set[object] = set()
    apply_bitmask, logprobs_of = sampler.apply_bitmask, sampler.sampler.logprobs_of
    for warm in (False, True):
        engine = build_engine(folder, **settings)
        runner = engine.runner
        assert isinstance(runner, ModelRunner)
        if warm:
            with monkeypatch.context() as patch:
                patch.setattr(
                    sampler, "apply_bitmask", lambda *args: (taken.add(("mask", args[2] is None)), apply_bitmask(*args))
                )
                patch.setattr(
                    sampler.sampler, "logprobs_of", lambda *args: (taken.add(("top", args[2])), logprobs_of(*args))[1]
                )
                lengths = watch_lengths(runner)
                runner.warm_up()
            assert not any(cache.any() for layer in runner.caches for cache in layer)
            assert lengths == {1, 2, 64, 256, 512}
        engine.add_request("a", [5, 6, 7], params)
        tokens[warm] = drain(engine)["a"]
        engine.close()
    assert taken == {("mask", True), ("mask", False), ("top", 0), ("top", 1), ("top", 2)}
    assert tokens[True] == tokens[False]


def watch_lengths(runner: ModelRunner) -> set[int]:
    """The lengths of single sequences that are launched from now on."""
    launch, lengths = runner.launch, set()

    def watched(plan: StepPlan) -> object:
        if len(plan.rows) == 1:
            lengths.add(int(np.max(plan.seq_lens)))
        return launch(plan)

    runner.launch = watched
    return lengths
