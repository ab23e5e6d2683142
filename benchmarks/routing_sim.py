"""The load of `benchmarks.routing` in simulated time: our router alone, over many placings of the prefixes.

    python -m benchmarks.routing_sim [--callers 2] [--groups 24] [--seeds 6]

The engines are real ones, with their schedulers, blocks and prefix caches; a step takes as long as `benchmarks.routing`
lets it sleep, and nobody waits. The callers know what Serve would tell them: the length of a replica's queue as of
their last request there, and the state of its cache as of the last second. A seed gives the replicas other names, and
so the prefixes other homes. Printed: means over the seeds.
"""

import argparse
import heapq
import itertools
import random
from collections.abc import Callable
from statistics import fmean
from typing import Any

import numpy as np

from app.router import Affinity, Busy
from benchmarks.common.percentiles import percentile
from benchmarks.routing import (
    BLOCK,
    CALLERS,
    CONCURRENCY,
    GROUPS,
    NUM_BLOCKS,
    OUTPUT,
    PREFIX,
    REPLICAS,
    SLOTS,
    STEP_S,
    TAIL,
    TOKEN_S,
)  # fmt: skip
from engine.block_hash import block_hashes
from engine.engine import Engine
from engine.outputs import StepOutput
from engine.runner import RunnerInfo
from engine.sampling_params import SamplingParams
from engine.step import StepPlan, StepResult

STATS_S = 1.0
RETRY_S = 0.025
"""Between two looks for a place when all replicas are full."""

PLACES = SLOTS * 5 // 4
"""Requests that a replica takes."""

PARAMS = SamplingParams(temperature=0.0, max_tokens=OUTPUT)


class Runner:
    """A model that takes no time, and tells how long a step would have taken."""

    def __init__(self) -> None:
        self.step_s = 0.0
        self.info = RunnerInfo(
            num_blocks=NUM_BLOCKS, block_size=BLOCK, max_num_seqs=SLOTS, max_num_batched_tokens=1024,
            max_model_len=4096, vocab_size=50_000, eos_token_ids=(), device="cpu", dtype="float32",
        )  # fmt: skip

    def launch(self, plan: StepPlan) -> StepResult:
        self.step_s = STEP_S + TOKEN_S * plan.num_tokens
        return StepResult(np.full(len(plan.sample), 5, dtype=np.int64))

    def collect(self, ticket: StepResult) -> StepResult:
        return ticket

    def close(self) -> None:
        pass


class Replica:
    def __init__(self, name: str) -> None:
        self.name = name
        self.runner = Runner()
        self.engine = Engine(self.runner)
        self.requests = 0
        self.is_stepping = False
        self.kv_free = 1.0


class Caller:
    """One ingress's router. queues: what it thinks each replica has."""

    def __init__(self, seed: int, replicas: list[Replica]) -> None:
        self.affinity = Affinity()
        self.rng = random.Random(seed)
        self.queues = dict.fromkeys((replica.name for replica in replicas), 0)
        self.left = 0

    def busy(self, replica: Replica) -> Busy:
        return Busy(self.queues[replica.name], SLOTS, replica.kv_free, NUM_BLOCKS)


class Simulation:
    """groups: prefixes, of which the first is asked for most."""

    def __init__(self, seed: int, callers: int, groups: int, requests: int) -> None:
        self.replicas = {name: Replica(name) for name in (f"{seed}-{i}" for i in range(REPLICAS))}
        replicas = list(self.replicas.values())
        self.callers = [Caller(seed * 100 + i, replicas) for i in range(callers)]
        self._groups = groups
        self._weights = [1 / (1 + i) ** 0.7 for i in range(groups)]
        self._due: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count()
        self._asked: dict[str, tuple[Caller, float]] = {}
        self.now = 0.0
        self.left = requests // callers * callers
        self.first_token_s: list[float] = []
        for caller in self.callers:
            caller.left = requests // callers
            for _ in range(CALLERS * CONCURRENCY // callers):
                self._ask(caller)
        self._at(STATS_S, self._report)

    def run(self) -> dict[str, float]:
        while self.left:
            self.now, _, action, arguments = heapq.heappop(self._due)
            action(*arguments)
        stats = [replica.engine.stats() for replica in self.replicas.values()]
        prompts = [each.prompt_tokens for each in stats]
        times = sorted(self.first_token_s)
        return {
            "requests_per_s": len(times) / self.now,
            "hit_rate": sum(each.cached_prompt_tokens for each in stats) / sum(prompts),
            "ttft_p50": percentile(times, 0.5),
            "ttft_p99": percentile(times, 0.99),
            "imbalance": max(prompts) * len(prompts) / sum(prompts),
        }

    def _at(self, when: float, action: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._due, (when, next(self._numbers), action, arguments))

    def _ask(self, caller: Caller) -> None:
        if caller.left:
            caller.left -= 1
            (group,) = caller.rng.choices(range(self._groups), self._weights)
            ids = [group * PREFIX + i for i in range(PREFIX)] + [caller.rng.randrange(40_000) for _ in range(TAIL)]
            name = str(next(self._numbers))
            self._asked[name] = caller, self.now
            self._at(self.now, self._route, caller, name, ids, block_hashes(ids, BLOCK))

    def _route(self, caller: Caller, name: str, ids: list[int], hashes: list[bytes]) -> None:
        ranked, _ = caller.affinity.rank(hashes, None, {n: caller.busy(r) for n, r in self.replicas.items()})
        for replica in (self.replicas[each] for each in ranked):
            if caller.queues[replica.name] >= PLACES:
                continue
            accepted = replica.requests < PLACES
            replica.requests += accepted
            caller.queues[replica.name] = replica.requests
            if accepted:
                caller.affinity.learn(hashes, None, replica.name, caller.busy(replica))
                replica.engine.add_request(name, ids, PARAMS, block_hashes=hashes)
                self._step(replica)
                return
        self._at(self.now + RETRY_S, self._route, caller, name, ids, hashes)

    def _step(self, replica: Replica) -> None:
        if not replica.is_stepping and replica.engine.has_work():
            replica.is_stepping = True
            output = replica.engine.step()
            self._at(self.now + replica.runner.step_s, self._end_step, replica, output)

    def _end_step(self, replica: Replica, output: StepOutput) -> None:
        replica.is_stepping = False
        for name in output.request_ids:
            caller, asked_at = self._asked[name]
            if asked_at >= 0:
                self.first_token_s.append(self.now - asked_at)
                self._asked[name] = caller, -1.0
        for finished in output.finished:
            caller, _ = self._asked.pop(finished.request_id)
            replica.requests -= 1
            caller.queues[replica.name] -= 1
            self.left -= 1
            self._ask(caller)
        self._step(replica)

    def _report(self) -> None:
        for replica in self.replicas.values():
            stats = replica.engine.stats()
            replica.kv_free = 1.0 - stats.live_blocks / stats.total_blocks
        self._at(self.now + STATS_S, self._report)


def simulate(seeds: int, callers: int = CALLERS, groups: int = GROUPS, requests: int = 600) -> dict[str, float]:
    """Means over `seeds` runs."""
    runs = [Simulation(seed, callers, groups, requests).run() for seed in range(seeds)]
    return {name: round(fmean(run[name] for run in runs), 3) for name in runs[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--callers", type=int, default=CALLERS)
    parser.add_argument("--groups", type=int, default=GROUPS)
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=6)
    options = parser.parse_args()
    told = simulate(options.seeds, options.callers, options.groups, options.requests)
    print("  ".join(f"{name} {value}" for name, value in told.items()))


if __name__ == "__main__":
    main()
