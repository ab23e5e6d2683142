"""Plans and results are the same on the other side."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from engine.engine import Engine
from engine.lora.adapter import Adapter, LowRank
from engine.remote.step_wire import PlanDecoder, PlanEncoder, decode_result, encode_result
from engine.sampling_params import SamplingParams
from engine.step import Logprobs, StepAdapters, StepPlan, StepResult
from tests.scripted import ShadowRunner, drain, shadow_continuation, swap_info


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if dataclasses.is_dataclass(one):
        for field in dataclasses.fields(one):
            assert_same(getattr(one, field.name), getattr(other, field.name))
    elif isinstance(one, np.ndarray):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    else:
        assert one == other


class WiredRunner(ShadowRunner):
    """Runs what comes out of the wire."""

    def __init__(self, **info: Any) -> None:
        super().__init__(**info)
        self.encoder, self.decoder = PlanEncoder(self.info.max_loras), PlanDecoder(self.info.max_loras)
        self.sizes: list[int] = []
        self.seen: set[str] = set()

    def launch(self, plan: StepPlan) -> StepResult:
        message = self.encoder.encode(plan)
        self.sizes.append(len(message))
        arrived = self.decoder.decode(bytearray(message))
        assert_same(plan, arrived)
        assert arrived.slots.flags.aligned
        assert arrived.token_ids.flags.writeable  # torch warns of what is not
        for field in dataclasses.fields(plan):
            if getattr(plan, field.name) is not None:
                self.seen.add(field.name)
        result = super().launch(arrived)
        again = decode_result(bytearray(encode_result(result)))
        assert_same(result, again)
        return again


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_engine_computes_the_same_behind_the_wire(asynchronous: bool) -> None:
    runner = WiredRunner(num_blocks=12, swap=swap_info(8), max_loras=1)
    engine = Engine(runner, async_scheduling=asynchronous)
    prompts = {f"r{i}": list(range(3 + i, 20 + 2 * i)) for i in range(5)}
    kinds = [
        {}, {"temperature": 1.0, "top_k": 3, "seed": 7}, {"frequency_penalty": 0.5}, {"logit_bias": {5: 1.0}},
        {"min_tokens": 20, "stop_token_ids": (5,), "prompt_logprobs": 2},
    ]  # fmt: skip
    for (name, prompt), kind in zip(prompts.items(), kinds, strict=True):
        params = SamplingParams(max_tokens=20, ignore_eos=True, **({"temperature": 0} | kind))
        engine.add_request(name, prompt, params, adapter=None if kind else Adapter("ab", {}))
    assert drain(engine) == {name: shadow_continuation(prompt, 20, 384) for name, prompt in prompts.items()}
    wanted = {"new_rows", "forbidden", "extras", "copies", "adapters"} | ({"pending"} if asynchronous else set())
    assert wanted <= runner.seen


def test_a_plan_for_the_same_sequences_is_short() -> None:
    runner = WiredRunner()
    engine = Engine(runner)
    engine.add_request("a", [5, 6, 7], SamplingParams(max_tokens=30, temperature=0, ignore_eos=True))
    drain(engine)
    assert min(runner.sizes) == 4 * 8 + 8 + 4 * 3  # head, slot, length, token and position


def test_an_adapter_travels_once_while_the_other_side_keeps_it() -> None:
    """It keeps two for each slot."""
    encoder, decoder = PlanEncoder(max_loras=1), PlanDecoder(max_loras=1)
    runner = ShadowRunner()
    plans: list[StepPlan] = []
    runner.launch = lambda plan: plans.append(plan) or ShadowRunner.launch(runner, plan)
    engine = Engine(runner)
    engine.add_request("a", [5, 6, 7], SamplingParams(max_tokens=1))
    drain(engine)
    big = {name: Adapter(name, {(0, 0): LowRank(torch.ones(8, 100), torch.ones(100, 8))}) for name in "abc"}
    sent = []
    for name in "ababcbca":
        adapters = StepAdapters(np.zeros(1, np.int32), ((0, big[name]),))
        message = encoder.encode(dataclasses.replace(plans[0], adapters=adapters))
        ((slot, arrived),) = decoder.decode(bytearray(message)).adapters.loads
        assert (slot, arrived.digest) == (0, name)
        assert torch.equal(arrived.parts[0, 0].a, big[name].parts[0, 0].a)
        sent.append(len(message) > 6000)
    assert sent == [True, True, False, False, True, False, False, True]


def test_results_with_log_probabilities() -> None:
    scores = Logprobs(np.array([[1, 2]]), np.array([[-0.5, -1.5]], np.float32), np.array([1]))
    for result in (
        StepResult(np.array([], np.int64)),
        StepResult(np.array([1, 2, 2**31 - 1])),
        StepResult(np.array([3]), scores),
        StepResult(np.array([], np.int64), None, scores),
    ):
        assert_same(result, decode_result(bytearray(encode_result(result))))
