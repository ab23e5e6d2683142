"""How many engine replicas there should be, from what the engines tell of themselves.

The setting that people give is a time to first token. A count is enough when

- the prompt tokens that wait can be computed in that time (`waiting_tokens`, by the measured speed of one replica),
- running and waiting requests have places in the batches, with some to spare for those that come meanwhile,
- the KV cache and the arithmetic of prompts have room to spare,
- and no request has waited longer than that time already, whatever the estimates say.

The count grows at once and shrinks late: the fewer must have been enough, by a wider margin, for all of the delay. The
last replica goes when nothing at all has been asked for its own delay.

Serve sends this module to its controller by value: standard library only, nothing of ours.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

GROW_AT = 0.8
SHRINK_AT = 0.6
"""Use of places, KV cache and arithmetic above which a pool grows; the replicas of a smaller pool must stay below the
second. The gap keeps a steady load from moving the count up and down."""

MAX_GROWTH = 2.0
"""Factor by which requests that have waited too long can grow the pool that let them wait."""


@dataclass(frozen=True, slots=True)
class Targets:
    """ttft_s: time to first token that the pool is sized for. Delays: seconds that fewer replicas must have been enough
    before they are fewer, and that nothing must have been asked before the last one goes."""

    ttft_s: float = 2.0
    downscale_delay_s: float = 60.0
    downscale_to_zero_delay_s: float = 300.0


@dataclass(frozen=True, slots=True)
class Load:
    """What the pool has to do, summed over its replicas.

    replicas: that run and have reported. slots: sequences that they can run at once.
    waiting, waiting_tokens: requests and prompt tokens in queues, in the engines and before them; queue_age_s: how long
        the first of them has waited.
    kv_used, prefill_used: of the KV cache and of the arithmetic, in replicas: 1.5 is one full and one half full.
    prefill_rate: prompt tokens that one replica computes a second; 0 while that is not known.
    """

    replicas: int
    slots: float
    running: float
    waiting: float
    waiting_tokens: float = 0.0
    queue_age_s: float = 0.0
    kv_used: float = 0.0
    prefill_used: float = 0.0
    prefill_rate: float = 0.0

    @property
    def is_idle(self) -> bool:
        return not (self.running or self.waiting)


@dataclass(frozen=True, slots=True)
class Quiet:
    """Since when fewer replicas would have been enough, and the most of these that were needed meanwhile."""

    since: float
    most: int


def needed(load: Load, ttft_s: float, use: float) -> int:
    """Replicas that `load` needs when each may be used to the share `use`. At least 1 unless it is idle."""
    if load.is_idle:
        return 0
    places = load.slots / load.replicas
    by_slots = (load.running + load.waiting) / (places * use)
    by_queue = 0.0
    if load.prefill_rate:
        # One prompt is computed by one replica: more of them than requests would help none.
        most = math.ceil(by_slots) + load.waiting
        by_queue = min(load.waiting_tokens / (load.prefill_rate * ttft_s), most)
    by_age = 0.0
    if load.waiting and load.queue_age_s > ttft_s:
        by_age = load.replicas * min(MAX_GROWTH, load.queue_age_s / ttft_s)
    most_needed = max(by_slots, by_queue, by_age, load.kv_used / use, load.prefill_used / use, 1.0)
    return math.ceil(most_needed - 1e-9)


def decide(
    load: Load, current: int, quiet: Quiet | None, now: float, targets: Targets, least: int, most: int
) -> tuple[int, Quiet | None]:
    """The count to aim for, and the state for the next call. A pure function.

    current: the count aimed for so far. quiet: of the last call, None at first. now: seconds, on any clock.
    least, most: bounds, 0 <= least <= most.
    """
    grown = needed(load, targets.ttft_s, GROW_AT)
    if grown > current:
        return max(least, min(most, grown)), None
    enough = max(least, min(needed(load, targets.ttft_s, SHRINK_AT), most))
    if enough >= current:
        return max(least, min(most, current)), None
    if current > 1:
        enough = max(1, enough)
        if enough == current:
            return current, None
    quiet = Quiet(now, enough) if quiet is None else Quiet(quiet.since, max(quiet.most, enough))
    delay = targets.downscale_to_zero_delay_s if current == 1 else targets.downscale_delay_s
    if now - quiet.since < delay:
        return max(least, min(most, current)), quiet
    return max(least, min(most, quiet.most)), None


SIGNALS = (
    "slots", "running", "waiting", "waiting_tokens", "queue_age_s", "kv_used", "prefill_used", "prefill_rate",
    "door_waiting", "door_tokens", "door_age_s",
)  # fmt: skip
"""What each replica reports (`app.reports.signals`).

door_*: what the ingress replicas hold back, as each replica was told.
"""


def load_of(reports: Iterable[Mapping[str, float]], queued: float, prefill_rate: float) -> Load | None:
    """The pool's load by the newest report of each replica; None while there is none.

    queued: requests that wait in Serve's own routers. prefill_rate: as known so far.
    """
    reports = [report for report in reports if "slots" in report]
    if not reports:
        return None

    def total(name: str) -> float:
        return sum(report[name] for report in reports)

    def most(name: str) -> float:
        return max(report[name] for report in reports)

    rates = [report["prefill_rate"] for report in reports if report["prefill_rate"]]
    return Load(
        replicas=len(reports),
        slots=total("slots"),
        running=total("running"),
        # Every replica is told the same of the doors.
        waiting=total("waiting") + most("door_waiting") + queued,
        waiting_tokens=total("waiting_tokens") + most("door_tokens"),
        queue_age_s=max(most("queue_age_s"), most("door_age_s")),
        kv_used=total("kv_used"),
        prefill_used=total("prefill_used"),
        prefill_rate=sum(rates) / len(rates) if rates else prefill_rate,
    )


class EnginePolicy:
    """The face to Serve: its context in, a count and the state for the next call out."""

    def __init__(self, **targets: float) -> None:
        self._targets = Targets(**targets)

    def __call__(self, ctx: Any) -> tuple[int, dict[str, Any]]:
        state = dict(ctx.policy_state or {})
        load = load_of(_newest(ctx.raw_metrics or {}), float(ctx.total_queued_requests or 0), state.get("rate", 0.0))
        if load is None:  # the first ones are on their way
            return ctx.target_num_replicas, state
        quiet = state.get("quiet")
        count, after = decide(
            load,
            ctx.target_num_replicas,
            None if quiet is None else Quiet(*quiet),
            ctx.current_time,
            self._targets,
            ctx.capacity_adjusted_min_replicas,
            ctx.capacity_adjusted_max_replicas,
        )
        state["rate"] = load.prefill_rate
        state["quiet"] = None if after is None else (after.since, after.most)
        return count, state


def _newest(metrics: Mapping[str, Mapping[Any, Any]]) -> list[dict[str, float]]:
    """Serve keeps a series for each signal and replica; their last values, by replica."""
    replicas: dict[Any, dict[str, float]] = {}
    for name in SIGNALS:
        for replica, series in metrics.get(name, {}).items():
            if series:
                replicas.setdefault(replica, {})[name] = series[-1].value
    return [report for report in replicas.values() if len(report) == len(SIGNALS)]
