"""Nano-vllm's workload at saturation: how much of the KV blocks that are held holds a token."""

import random

import pytest

from engine.engine import Engine
from engine.sampling_params import SamplingParams
from tests.scripted import ScriptedRunner


@pytest.mark.parametrize("num_blocks", [8000, 1500], ids=["all have room", "a pool that preempts"])
@pytest.mark.parametrize("overlap", [False, True])
def test_nine_tenths_of_the_slots_in_live_blocks_hold_a_token(num_blocks: int, overlap: bool) -> None:
    rng = random.Random(0)
    runner = ScriptedRunner(
        [5], num_blocks=num_blocks, block_size=16, max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=4096
    )
    engine = Engine(runner, async_scheduling=overlap)
    for i in range(128):
        prompt = [rng.randrange(384) for _ in range(rng.randint(100, 1024))]
        engine.add_request(str(i), prompt, SamplingParams(max_tokens=rng.randint(100, 1024), ignore_eos=True))
    fills = []
    while engine.has_work() and engine.step() is not None:
        stats = engine.stats()
        if stats.num_waiting:
            fills.append(stats.slots_used / (stats.live_blocks * 16))
    assert len(fills) > 100
    assert min(fills) >= 0.9
    assert (engine.stats().preemptions > 0) == (num_blocks == 1500)
