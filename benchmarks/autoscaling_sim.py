"""Replays a bursty trace against the autoscaling policy, on replicas that are simulated event by event.

    python -m benchmarks.autoscaling_sim [--json]

The trace: a quiet base load, bursts of ten times as much that come within a second, a slow wave, and a silence at the
end (seeded; see `trace` in `benchmarks.pools.simulated`). Beside our policy, on the same trace: Serve's own, at its
defaults, and with its delays and target set by hand for this load.

Printed for each: time to first token from arrival, in seconds (median, 90th, 99th percentile, worst), refusals, the
seconds that replicas were up or starting, the largest count, and the changes of direction.
"""

import argparse
import json
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from ray.serve import autoscaling_policy
from ray.serve._private.common import DeploymentID
from ray.serve.config import AutoscalingConfig, AutoscalingContext

from app.autoscaling import Quiet, Targets, decide
from benchmarks.common.percentiles import percentile
from benchmarks.pools.simulated import PLACES, TICK_S, Simulation, trace


class Ours:
    def __init__(self, targets: Targets, least: int) -> None:
        self._targets, self._least = targets, least
        self._quiet: Quiet | None = None
        self._used = 0.0
        self._busy_s = 0.0

    def __call__(self, now: float, pool: Simulation) -> int:
        busy_s = pool.busy_s
        self._used += 0.05 * (max(0.0, busy_s - self._busy_s) / TICK_S - self._used)
        self._busy_s = busy_s
        load = pool.load(self._used)
        if load is None:  # Serve starts one for what waits, and then asks
            return max(pool.target, self._least, min(1, len(pool.queue)))
        count, self._quiet = decide(load, pool.target, self._quiet, now, self._targets, self._least, pool.most)
        return count


class Clock:
    """In the place of the module `time` in Serve's policy, which measures its delays by the wall."""

    now = 1e6

    def time(self) -> float:
        return self.now


class Serves:
    """Serve's own policy, called as its controller does; it sees requests and nothing else."""

    def __init__(self, least: int, most: int, **options: Any) -> None:
        self._config = AutoscalingConfig(min_replicas=least, max_replicas=most, **options)
        self._policy = autoscaling_policy._apply_autoscaling_config(
            autoscaling_policy.replica_queue_length_autoscaling_policy
        )
        self._state: dict[str, Any] = {}
        self._least = least
        self._seen: deque[tuple[float, float]] = deque()
        self._clock = Clock()
        autoscaling_policy.time = self._clock

    def __call__(self, now: float, pool: Simulation) -> int:
        self._clock.now = now + 1e6
        up = [replica for replica in pool.replicas.values() if not replica.leaving]
        ongoing = float(len(pool.queue) + sum(replica.outstanding for replica in up))
        self._seen.append((now, ongoing))
        while self._seen[0][0] < now - self._config.look_back_period_s:
            self._seen.popleft()
        context = AutoscalingContext(
            deployment_id=DeploymentID(name="engine"),
            deployment_name="engine",
            app_name="app",
            current_num_replicas=len(up),
            target_num_replicas=pool.target,
            running_replicas=[],
            total_num_requests=sum(n for _, n in self._seen) / len(self._seen),
            total_queued_requests=float(len(pool.queue)),
            aggregated_metrics={},
            raw_metrics={},
            capacity_adjusted_min_replicas=self._least,
            capacity_adjusted_max_replicas=pool.most,
            policy_state=self._state,
            last_scale_up_time=None,
            last_scale_down_time=None,
            current_time=now,
            config=self._config,
        )
        wanted, self._state = self._policy(context)
        count: int = math.ceil(wanted)
        return max(self._least, min(pool.most, count))


@dataclass(frozen=True, slots=True)
class Report:
    scale: float
    policy: str
    requests: int
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    ttft_max: float
    refused: int
    replica_s: int
    largest: int
    turns: int
    simulated_in_s: float


def simulate(scale: float, name: str, policy: Callable[[float, Simulation], int], most: int, seed: int = 0) -> Report:
    arrivals = trace(scale, seed)
    pool = Simulation(arrivals, policy, most)
    started = time.perf_counter()
    pool.run()
    seconds = time.perf_counter() - started
    for replica in pool.replicas.values():
        pool.replica_s += pool.now - replica.up_at
    ttft = sorted(pool.ttft)

    p50, p90, p99 = (round(percentile(ttft, share), 2) for share in (0.5, 0.9, 0.99))
    return Report(
        scale, name, len(arrivals), p50, p90, p99, round(ttft[-1], 2),
        pool.refused, round(pool.replica_s), pool.largest, pool.turns, round(seconds, 1),
    )  # fmt: skip


def policies(least: int, most: int) -> dict[str, Callable[[], Callable[[float, Simulation], int]]]:
    return {
        "ours, 2 s": lambda: Ours(Targets(2.0, 60.0, 300.0), least),
        "ours, 8 s": lambda: Ours(Targets(8.0, 60.0, 300.0), least),
        "Serve's defaults": lambda: Serves(least, most),
        "Serve's, set by hand": lambda: Serves(
            least,
            most,
            target_ongoing_requests=0.8 * PLACES,
            upscale_delay_s=0,
            downscale_delay_s=60,
            downscale_to_zero_delay_s=300,
            look_back_period_s=2.0,
            metrics_interval_s=0.5,
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--scale", type=float, nargs="+", default=[5.0, 500.0], help="requests a second at rest")
    options = parser.parse_args()
    for scale in options.scale:
        most = math.ceil(scale * 4)
        for name, make in policies(0, most).items():
            report = asdict(simulate(scale, name, make(), most))
            if options.json:
                print(json.dumps(report), flush=True)
            else:
                print("  ".join(f"{key} {value}" for key, value in report.items()), flush=True)


if __name__ == "__main__":
    main()
