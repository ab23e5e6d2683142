"""Who waits for a slot of an adapter, and who goes past: driven without a model."""

from types import SimpleNamespace
from typing import Any

import pytest

from engine.engine import Engine
from engine.sampling_params import SamplingParams
from tests.scripted import ScriptedRunner


def adapter(name: str) -> Any:
    return SimpleNamespace(digest=name.encode().hex())


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens)


def adapter_engine(max_num_seqs: int, asynchronous: bool = False) -> Engine:
    runner = ScriptedRunner([5], eos_token_ids=(), max_loras=1, max_num_seqs=max_num_seqs, max_num_batched_tokens=64)
    return Engine(runner, async_scheduling=asynchronous)


def order(engine: Engine) -> list[str]:
    """The requests that still make tokens, in the order of the first of them."""
    began: dict[str, None] = {}
    while engine.has_work():
        began.update(dict.fromkeys(engine.step().request_ids))
    return list(began)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_base_requests_behind_very_many_that_wait_for_a_slot_go_on(asynchronous: bool) -> None:
    engine = adapter_engine(4, asynchronous)
    engine.add_request("holds the slot", [1], params(8), adapter=adapter("one"))
    engine.step()
    for i in range(200):
        engine.add_request(f"waits {i}", [2], params(1), adapter=adapter("two"))
    engine.add_request("same adapter", [3], params(1), adapter=adapter("one"))
    engine.add_request("base", [4], params(1))
    began = order(engine)
    assert began[:2] == ["holds the slot", "base"]
    assert began[2:] == [*(f"waits {i}" for i in range(200)), "same adapter"], "in the order in which they came"
    assert engine.stats().live_blocks == 0


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_request_that_waits_for_a_slot_does_not_keep_the_batch_class_in_its_place(asynchronous: bool) -> None:
    engine = adapter_engine(2, asynchronous)
    engine.add_request("holds the slot", [1], params(12), adapter=adapter("one"))
    engine.add_request("batch", [2], params(12), is_batch=True)
    for _ in range(3):
        engine.step()
    engine.add_request("waits", [3], params(2), adapter=adapter("two"))
    engine.add_request("base", [4], params(2))
    ends = []
    while engine.has_work():
        ends += [finished.request_id for finished in engine.step().finished]
    assert ends == ["base", "holds the slot", "waits", "batch"] or ends == ["base", "holds the slot", "batch", "waits"]
    assert engine.stats().preemptions == 1


def test_a_request_that_waits_for_a_slot_does_not_keep_a_tenant_with_most_rows_in_them() -> None:
    engine = adapter_engine(4)
    engine.add_request("holds the slot", [1], params(12), tenant="a", adapter=adapter("one"))
    for i in range(3):
        engine.add_request(f"a {i}", [2, i], params(12), tenant="a")
    for _ in range(3):
        engine.step()
    engine.add_request("waits", [3], params(2), tenant="b", adapter=adapter("two"))
    engine.add_request("base", [4], params(2), tenant="b")
    assert engine.stats().num_running == 4
    ends = []
    while engine.has_work():
        ends += [finished.request_id for finished in engine.step().finished]
    assert ends[0] == "base"


def test_the_tenant_that_is_next_is_not_the_one_whose_request_cannot_start() -> None:
    engine = adapter_engine(2)
    for tenant in ("a", "b"):
        engine.add_request(f"{tenant} runs", [1], params(4), tenant=tenant, adapter=adapter("one"))
    engine.step()
    engine.add_request("a waits", [2], params(2), tenant="a", adapter=adapter("two"))
    engine.add_request("b waits", [2], params(2), tenant="b", adapter=adapter("two"))
    for i in range(3):
        engine.add_request(f"a base {i}", [3, i], params(2), tenant="a")
        engine.add_request(f"b base {i}", [3, i], params(2), tenant="b")
    ends = []
    while engine.has_work():
        ends += [finished.request_id for finished in engine.step().finished]
    assert len(ends) == 10
    assert {name[0] for name in ends[2:4]} == {"a", "b"}, "tenants go on taking turns"
