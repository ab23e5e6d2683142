"""Our router beside Serve's power of two and Ray's PrefixCacheAffinityRouter, on prompts that share prefixes.

    python -m benchmarks.routing [--json]

Four engine replicas on a local cluster: the engine as it is, with its scheduler, blocks and prefix cache, around a
model that takes time and computes nothing: `STEP_S` a step and `TOKEN_S` a token. So the replicas do not fight for the
cores of one machine, and what a cached prefix saves is exact. Their caches hold a third of the prefixes each. Two
callers, as two ingress replicas would, keep `CONCURRENCY` requests each in flight: a prefix of a group (some groups
are asked for more than others) and a tail of its own. Each router is run as often as `--rounds` says, in alternation.

Printed for each run: requests a second; the hit rate by the engines' own counters; time to first token, median and 99th
percentile, in seconds; the most requests of a replica over the mean.
"""

import argparse
import asyncio
import itertools
import json
import random
import time
from typing import Any

import numpy as np
import ray
from ray import serve
from ray.serve.config import RequestRouterConfig

from app.engine_client import Submission
from app.engine_deployment import EngineDeployment
from app.replica import EngineReplica
from app.reports.signals import Signals
from app.router import AffinityRouter
from app.transport.serve_client import ServeEngineClient
from benchmarks.common.percentiles import percentile
from engine.block_hash import block_hashes
from engine.engine import Engine
from engine.runner import RunnerInfo
from engine.sampling_params import SamplingParams
from engine.step import StepPlan, StepResult
from engine.step_loop import StepLoop

REPLICAS = 4
CALLERS = 2
CONCURRENCY = 24
GROUPS = 24
PREFIX = 768
TAIL = 64
OUTPUT = 16
BLOCK = 16
STEP_S = 0.004
TOKEN_S = 0.0002
SLOTS = 16
NUM_BLOCKS = GROUPS // 3 * PREFIX // BLOCK + SLOTS * (TAIL + OUTPUT) // BLOCK + 32

_RAY_LLM = "ray.llm._internal.serve.routing_policies"

ROUTERS: dict[str, Any] = {
    "nanoserve": AffinityRouter,
    "power of two": "ray.serve._private.request_router:PowerOfTwoChoicesRequestRouter",
    # By its own module: ray.serve.llm would need the packages of Ray's LLM server.
    "Ray's prefix affinity": f"{_RAY_LLM}.prefix_aware.prefix_aware_router:PrefixCacheAffinityRouter",
}


class TimedRunner:
    """A model whose steps take as long as they have tokens, and whose every token is 5."""

    def __init__(self) -> None:
        self.info = RunnerInfo(
            num_blocks=NUM_BLOCKS, block_size=BLOCK, max_num_seqs=SLOTS, max_num_batched_tokens=1024,
            max_model_len=4096, vocab_size=50_000, eos_token_ids=(), device="cpu", dtype="float32",
        )  # fmt: skip

    def launch(self, plan: StepPlan) -> StepResult:
        time.sleep(STEP_S + TOKEN_S * plan.num_tokens)
        return StepResult(np.full(len(plan.sample), 5, dtype=np.int64))

    def collect(self, ticket: StepResult) -> StepResult:
        return ticket

    def close(self) -> None:
        pass


class TimedEngine(EngineDeployment):
    def __init__(self) -> None:
        engine = Engine(TimedRunner())
        self._replica = EngineReplica(lambda on_output: StepLoop(engine, on_output))
        self._signals = Signals(SLOTS)


class PromptSubmission(Submission):
    """With the text that Ray's router reads."""

    @property
    def prompt(self) -> str:
        return " ".join(map(str, self.prompt_ids))


class Caller:
    """What an ingress replica does, without HTTP."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._rng = random.Random(number)
        self._client = ServeEngineClient(serve.get_deployment_handle("engine", "routing"))

    async def run(self, requests: int) -> list[float]:
        """Times to first token."""
        numbers = itertools.count()
        times: list[float] = []

        async def work() -> None:
            while (number := next(numbers)) < requests:
                times.append(await self._ask(f"{self._number}-{number}"))

        await asyncio.gather(*(work() for _ in range(CONCURRENCY)))
        return times

    async def _ask(self, name: str) -> float:
        (group,) = self._rng.choices(range(GROUPS), [1 / (1 + i) ** 0.7 for i in range(GROUPS)])
        ids = [group * PREFIX + i for i in range(PREFIX)] + [self._rng.randrange(40_000) for _ in range(TAIL)]
        submission = PromptSubmission(
            name, ids, SamplingParams(temperature=0.0, max_tokens=OUTPUT), block_hashes=block_hashes(ids, BLOCK)
        )
        began, first = time.perf_counter(), None
        stream = self._client.submit(submission)
        try:
            async for _ in stream:
                first = first or time.perf_counter() - began
        finally:
            stream.close()
        assert first is not None
        return first


def measure(router: str, requests: int) -> dict[str, Any]:
    engine = serve.deployment(
        TimedEngine,
        name="engine",
        num_replicas=REPLICAS,
        max_ongoing_requests=SLOTS * 5 // 4,
        ray_actor_options={"num_cpus": 0.1},
        request_router_config=RequestRouterConfig(
            request_router_class=ROUTERS[router], request_routing_stats_period_s=1.0
        ),
    )
    handle = serve.run(engine.bind(), name="routing", route_prefix=None)
    callers = [ray.remote(Caller).options(num_cpus=0.1).remote(number) for number in range(CALLERS)]
    ray.get([caller.__ray_ready__.remote() for caller in callers])
    began = time.perf_counter()
    times = sorted(itertools.chain(*ray.get([caller.run.remote(requests // CALLERS) for caller in callers])))
    seconds = time.perf_counter() - began
    stats = handle.broadcast("stats").results(timeout_s=10)
    prompts = [replica.prompt_tokens for replica in stats]
    for caller in callers:
        ray.kill(caller)
    serve.delete("routing")
    return {
        "router": router,
        "requests_per_s": round(len(times) / seconds, 1),
        "hit_rate": round(sum(replica.cached_prompt_tokens for replica in stats) / sum(prompts), 3),
        "ttft_p50": round(percentile(times, 0.5), 3),
        "ttft_p99": round(percentile(times, 0.99), 3),
        "imbalance": round(max(prompts) * len(prompts) / sum(prompts), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, namespace="serve")
    try:
        for turn in range(options.rounds):
            names = list(ROUTERS)
            for name in names if turn % 2 == 0 else reversed(names):
                told = measure(name, options.requests)
                print(json.dumps(told) if options.json else "  ".join(f"{k} {v}" for k, v in told.items()), flush=True)
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    from benchmarks import routing  # what is sent to the replicas must be found by its name there

    routing.main()
