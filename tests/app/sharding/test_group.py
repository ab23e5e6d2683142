"""Shards as Ray actors, without Serve and without a model: how they come, compute, are lost and leave."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group, remove_placement_group

from app.resources import shard_bundle
from app.shards import ShardedRunner, ShardGroup
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import EngineDeadError
from engine.sampling_params import SamplingParams
from tests import tiny_models
from tests.app.sharding.processes import alive, wait
from tests.app.sharding.standin_rank import StandInRank, lazy_rank
from tests.scripted import drain, shadow_continuation

SHARDS = 2


class Shards:
    """Stand-in ranks and the engine over them."""

    def __init__(self, folder: Path, timeout_s: float = 30.0, nodes: tuple[str, ...] = ("first",) * SHARDS) -> None:
        """nodes: the resource of the node of each shard."""
        self.folder = folder
        self.bundles = placement_group([shard_bundle(0) | {node: 0.001} for node in nodes])
        config = EngineConfig(model=str(folder), tensor_parallel_size=SHARDS, shard_timeout_s=timeout_s)
        self.lost = threading.Event()
        try:
            group = ShardGroup(config, (self.bundles, 0), StandInRank)
        except BaseException:
            remove_placement_group(self.bundles)
            raise
        self.runner = ShardedRunner(group, timeout_s, self.lost.set)
        self.engine = Engine(self.runner)

    def pid(self, rank: int) -> int:
        return int((self.folder / f"rank-{rank}").read_text())

    def answer(self, prompt: list[int], num_tokens: int = 10) -> list[int]:
        name = f"after {self.engine.stats().steps} steps"
        self.engine.add_request(name, prompt, SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True))
        return drain(self.engine)[name]

    def gone(self) -> bool:
        return not any(alive(self.pid(rank)) for rank in range(SHARDS))

    def close(self) -> None:
        self.engine.close()
        remove_placement_group(self.bundles)


@pytest.fixture
def make(cluster: Cluster, tmp_path: Path) -> Iterator[Callable[..., Shards]]:
    made: list[Shards] = []

    def start(**options: Any) -> Shards:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(Shards(folder, **options))
        return made[-1]

    yield start
    for shards in made:
        shards.close()
        wait(shards.gone)


def test_groups_on_one_machine_do_not_meet_and_leave_with_their_runners(make: Callable[..., Shards]) -> None:
    one, two = make(), make()
    for shards, prompt in ((one, [5, 6]), (two, list(range(3, 60))), (one, [10])):
        assert shards.answer(prompt) == shadow_continuation(prompt, 10, 384)
    one.close()
    wait(one.gone)
    assert not one.lost.is_set()
    with pytest.raises(EngineDeadError, match="closed"):
        one.answer([1])
    assert two.answer([11]) == shadow_continuation([11], 10, 384)


def test_a_first_shard_on_another_node_computes_the_same_and_is_ended_when_it_stops(
    make: Callable[..., Shards], second_node: Any
) -> None:
    shards = make(nodes=("second", "first"), timeout_s=1.0)
    for prompt in ([5, 6, 7], list(range(3, 60))):
        assert shards.answer(prompt) == shadow_continuation(prompt, 10, 384)
    os.kill(shards.pid(0), signal.SIGSTOP)
    wait(shards.lost.is_set)
    wait(shards.gone, 10.0)
    with pytest.raises(EngineDeadError, match=r"shard 0 has said nothing for 1\.\d s"):
        shards.answer([6])


def test_a_shard_that_is_killed_with_nothing_to_do_is_seen(make: Callable[..., Shards]) -> None:
    shards = make()
    os.kill(shards.pid(1), signal.SIGKILL)
    wait(shards.lost.is_set, 1.0)
    wait(shards.gone)
    with pytest.raises(EngineDeadError, match="the process of shard 1 has ended"):
        shards.answer([7])


def test_a_collective_that_times_out_ends_the_group(cluster: Cluster, tmp_path: Path) -> None:
    model = tiny_models.llama(tmp_path / "tiny")
    config = EngineConfig(
        model=str(model), tensor_parallel_size=SHARDS, shard_timeout_s=1.0, num_gpu_blocks_override=16, device="cpu"
    )
    bundles = placement_group([shard_bundle(0)] * SHARDS)
    group = ShardGroup(config, (bundles, 0), lazy_rank)
    engine = Engine(ShardedRunner(group, timeout_s=30.0))
    engine.add_request("a", [5, 6, 7], SamplingParams(max_tokens=10, ignore_eos=True))
    engine.step()
    engine.step()
    began = time.monotonic()
    with pytest.raises(EngineDeadError, match=r"rank 0 of 2 waited for the others in \w+: one did not answer in 1 s"):
        engine.step()
    print(f"seen after {time.monotonic() - began:.2f} s")
    wait(lambda: not any(alive(place.pid) for place in group.places))
    engine.close()
    remove_placement_group(bundles)


def test_a_step_that_fails_on_a_rank_ends_its_requests_alone(make: Callable[..., Shards]) -> None:
    shards = make()
    for _ in range(2):
        assert shards.answer([5, 6]) == shadow_continuation([5, 6], 10, 384)
        (shards.folder / "raise").write_text("0")
        shards.engine.add_request("poison", [5, 6, 7], SamplingParams(max_tokens=10))
        (ended,) = shards.engine.step().finished
        assert (ended.request_id, ended.error) == ("poison", "StepFailedError in a step of the engine")
        (shards.folder / "raise").unlink()
    assert shards.answer([5, 6, 7]) == shadow_continuation([5, 6, 7], 10, 384)
    assert not shards.lost.is_set()


def test_a_rank_that_fails_and_cannot_go_on_ends_the_group_with_its_reason(make: Callable[..., Shards]) -> None:
    shards = make()
    (shards.folder / "cannot go on").write_text("0")
    (shards.folder / "raise").write_text("0")
    with pytest.raises(EngineDeadError, match=r"shard 0 failed: RuntimeError\('made to fail'\)"):
        shards.answer([5])
    wait(shards.gone)


def test_a_rank_that_cannot_start_says_why_and_leaves_nothing(make: Callable[..., Shards], tmp_path: Path) -> None:
    (tmp_path / "start").write_text("1")
    with pytest.raises(ValueError, match="made to fail at the start"):
        Shards(tmp_path)
