"""The autoscaling policy as a pure function, and its face to Serve."""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray import cloudpickle
from ray.serve._private.constants import (
    CONTROL_LOOP_INTERVAL_S,
    RAY_SERVE_AUTOSCALING_METRIC_RECORD_INTERVAL_FACTOR,
)
from ray.serve.config import AutoscalingPolicy

from app.autoscaling import SIGNALS, EnginePolicy, Load, Quiet, Targets, decide, load_of, needed
from app.building import _replicas
from app.reports.door_reports import INTERVAL_S
from app.reports.signals import DOOR_REPORT_S, DoorReport, PrefillMeter, Signals
from app.settings import load_settings
from engine.outputs import EngineStats

TARGETS = Targets(ttft_s=2.0, downscale_delay_s=60.0, downscale_to_zero_delay_s=300.0)


def load(replicas: int = 2, slots: int = 16, **values: float) -> Load:
    return Load(**({"replicas": replicas, "slots": replicas * slots, "running": 0, "waiting": 0} | values))


def grow(load: Load, current: int, most: int = 100) -> int:
    return decide(load, current, None, 0.0, TARGETS, 0, most)[0]


def test_a_queue_is_sized_by_the_time_to_first_token() -> None:
    busy = load(running=8, waiting=50, waiting_tokens=40_000, prefill_rate=1000.0)
    assert grow(busy, 2) == 20  # 40,000 tokens in 2 s at 1,000 a second
    assert decide(busy, 2, None, 0.0, replace(TARGETS, ttft_s=10.0), 0, 100)[0] == 5
    assert grow(busy, 2, most=6) == 6


def test_more_replicas_than_requests_help_no_prompt() -> None:
    assert grow(load(waiting=1, waiting_tokens=100_000, prefill_rate=1000.0, running=1), 1) == 2


def test_places_are_kept_free_for_those_to_come() -> None:
    assert grow(load(running=26), 2) == 3  # 26 of 32 is more than 0.8
    assert grow(load(running=25), 2) == 2


def test_a_queue_that_is_too_old_grows_the_pool_whatever_the_estimates_say() -> None:
    old = load(running=4, waiting=3, queue_age_s=3.0)
    assert grow(old, 2) == 3
    assert grow(replace(old, queue_age_s=300.0), 2) == 4
    assert grow(replace(old, queue_age_s=300.0), 4) == 4, "by those that run, not by those that start"
    assert grow(replace(old, queue_age_s=1.9), 2) == 2


@pytest.mark.parametrize("signal", ["kv_used", "prefill_used"])
def test_full_caches_and_busy_arithmetic_grow_the_pool(signal: str) -> None:
    assert grow(load(running=4, **{signal: 1.7}), 2) == 3
    assert grow(load(running=4, **{signal: 1.5}), 2) == 2


def walk(loads: list[tuple[float, Load]], current: int, least: int = 0) -> list[int]:
    counts, quiet = [], None
    for now, at in loads:
        current, quiet = decide(at, current, quiet, now, TARGETS, least, 100)
        counts.append(current)
    return counts


def test_fewer_must_be_enough_for_all_of_the_delay() -> None:
    calm, busy = load(4, running=4), load(4, running=50)
    assert walk([(0, calm), (30, calm), (59, calm), (61, calm)], 4) == [4, 4, 4, 1]
    assert walk([(0, calm), (59, busy), (61, calm), (119, calm), (122, calm)], 4) == [4, 4, 4, 4, 1]
    some = load(4, running=25)  # 3 are enough
    assert walk([(0, calm), (30, some), (61, calm)], 4) == [4, 4, 3], "as many as were needed in the meantime"


def test_the_last_one_goes_after_a_delay_of_its_own_and_only_when_nothing_is_asked() -> None:
    idle = load(1)
    assert walk([(0, idle), (299, idle), (301, idle)], 1) == [1, 1, 0]
    assert walk([(0, idle), (299, load(1, running=1)), (301, idle), (600, idle)], 1) == [1, 1, 1, 1]
    assert walk([(0, idle), (1000, idle)], 1, least=1) == [1, 1]
    assert walk([(0, load(3)), (61, load(3)), (62, idle), (300, idle), (363, idle)], 3) == [3, 1, 1, 1, 0]


@pytest.mark.parametrize("running", range(1, 200, 7))
def test_a_steady_load_does_not_move_the_count(running: int) -> None:
    current = grow(load(1, running=running), 1)
    times = [(float(t), load(current, running=running)) for t in range(0, 1000, 10)]
    assert set(walk(times, current)) == {current}


amounts = st.floats(0, 1e6, allow_nan=False)
loads = st.builds(
    Load,
    replicas=st.integers(1, 5000),
    slots=st.floats(1, 1e6),
    running=amounts,
    waiting=amounts,
    waiting_tokens=amounts,
    queue_age_s=amounts,
    kv_used=amounts,
    prefill_used=amounts,
    prefill_rate=amounts,
)


@settings(max_examples=300, deadline=None)
@given(loads, st.integers(0, 50), st.integers(0, 50), st.integers(0, 60), amounts, st.booleans())
def test_the_count_keeps_its_bounds_and_never_drops_at_once(
    load: Load, least: int, extra: int, current: int, now: float, first: bool
) -> None:
    most = max(1, least + extra)
    quiet = None if first else Quiet(max(0.0, now - 1), 1)
    count, after = decide(load, current, quiet, now, TARGETS, least, most)
    assert least <= count <= most
    if least <= current <= most:
        assert count >= current, "a second of quiet is not enough"
    if load.running or load.waiting:
        assert count >= 1
    assert after is None or after.since <= now


@settings(max_examples=300, deadline=None)
@given(loads, st.sampled_from(["running", "waiting", "waiting_tokens", "kv_used", "prefill_used", "queue_age_s"]))
def test_more_load_never_needs_fewer(load: Load, signal: str) -> None:
    more = replace(load, **{signal: getattr(load, signal) * 1.5 + 1})
    assert needed(more, 2.0, 0.8) >= needed(load, 2.0, 0.8)
    assert needed(load, 2.0, 0.6) >= needed(load, 2.0, 0.8)
    assert needed(load, 1.0, 0.8) >= needed(load, 2.0, 0.8)


def report(**values: float) -> dict[str, float]:
    return dict.fromkeys(SIGNALS, 0.0) | {"slots": 16.0} | values


def test_replicas_add_up_and_the_doors_are_counted_once() -> None:
    pool = load_of(
        [
            report(running=3, waiting=1, door_waiting=7, door_tokens=70, queue_age_s=1, prefill_rate=100),
            report(running=4, door_waiting=7, door_tokens=70, door_age_s=5),
        ],
        queued=2,
        prefill_rate=50,
    )
    assert pool == Load(2, 32, 7, 1 + 7 + 2, 70, 5, 0, 0, 100)
    assert load_of([], 0, 0) is None
    assert load_of([{"ongoing": 1.0}], 0, 0) is None


@dataclass
class Point:
    value: float


def context(reports: list[dict[str, float]], **values: Any) -> Any:
    metrics = {name: {i: [Point(0.0), Point(r[name])] for i, r in enumerate(reports)} for name in SIGNALS}
    defaults: dict[str, Any] = {
        "policy_state": {}, "raw_metrics": metrics, "total_queued_requests": 0.0, "target_num_replicas": 1,
        "current_time": 0.0, "capacity_adjusted_min_replicas": 0, "capacity_adjusted_max_replicas": 8,
    }  # fmt: skip
    return SimpleNamespace(**(defaults | values))


def test_the_policy_reads_the_newest_values_and_remembers() -> None:
    policy = EnginePolicy(ttft_s=2.0)
    count, state = policy(context([report(running=16, waiting=30, prefill_rate=10)]))
    assert count == 4
    assert state["rate"] == 10
    idle = context([report()], policy_state=state, target_num_replicas=1)
    count, state = policy(idle)
    assert (count, state["rate"]) == (1, 10)
    count, _ = policy(context([report()], policy_state=state, current_time=301.0))
    assert count == 0
    assert policy(context([], target_num_replicas=3))[0] == 3, "those that start have not reported"
    assert policy(context([report()], total_queued_requests=40.0))[0] == 4


def test_serve_takes_it_by_value() -> None:
    policy = AutoscalingPolicy(policy_function=EnginePolicy, policy_kwargs={"ttft_s": 3.0})
    data = policy.get_serialized_policy_def()
    assert data is not None
    assert b"app.reports.signals" not in data
    assert b"engine." not in data
    assert cloudpickle.loads(data)(ttft_s=3.0)(context([report(running=1)]))[0] == 1


def stats(**values: float) -> EngineStats:
    names = EngineStats.__dataclass_fields__
    return EngineStats(**(dict.fromkeys(names, 0) | {"total_blocks": 10} | values))


def test_a_replica_tells_every_signal_and_forgets_doors_that_fall_silent() -> None:
    now = [100.0]
    signals = Signals(16, clock=lambda: now[0])
    signals.note_door(DoorReport("a", 5, 500.0, 1.0))
    signals.note_door(DoorReport("b", 1, 10.0, 3.0))
    told = signals.autoscaling(stats(num_running=3, live_blocks=5))
    assert set(told) == set(SIGNALS)
    assert (told["running"], told["kv_used"], told["door_waiting"], told["door_tokens"], told["door_age_s"]) == (
        3, 0.5, 6, 510, 3.0,
    )  # fmt: skip
    now[0] += DOOR_REPORT_S / 2
    signals.note_door(DoorReport("a", 2, 20.0, 1.0))
    now[0] += DOOR_REPORT_S * 0.75
    assert signals.autoscaling(stats())["door_waiting"] == 2


def test_the_speed_of_prompts_is_read_while_more_of_them_wait() -> None:
    meter = PrefillMeter()
    for second in range(5):
        meter.read(second, stats(prompt_tokens=second * 10))
    assert meter.rate == 0, "nothing waited: the engine could have done more"
    for second in range(5, 10):
        meter.read(second, stats(prompt_tokens=second * 1000, cached_prompt_tokens=second * 200, num_waiting=3))
    assert meter.rate == pytest.approx(800, rel=0.05)
    assert 0.3 < meter.used < 0.6
    for second in range(10, 60):
        meter.read(second, stats(prompt_tokens=10_000, cached_prompt_tokens=2000))
    assert meter.used < 0.02
    assert meter.rate > 0


def test_settings_make_the_deployment_autoscale_by_our_policy() -> None:
    fixed = load_settings({"num_replicas": 3}, environ={})
    assert _replicas(fixed) == {"num_replicas": 3}
    bounds = load_settings({"max_replicas": 4, "min_replicas": 0, "target_ttft_s": 3}, environ={})
    config = _replicas(bounds)["autoscaling_config"]
    assert (config.min_replicas, config.max_replicas, config.upscale_delay_s) == (0, 4, 0)
    # A door's report, a reading, a report to the controller and its decision, one after the other.
    reading = config.look_back_period_s * RAY_SERVE_AUTOSCALING_METRIC_RECORD_INTERVAL_FACTOR
    assert INTERVAL_S + reading + config.metrics_interval_s + CONTROL_LOOP_INTERVAL_S < 2
    policy = config.policy.get_policy()(**config.policy.policy_kwargs)
    assert policy(context([report(running=16)]))[0] == 2
