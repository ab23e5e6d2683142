"""Nothing, then many clients at once, then nothing: from no replica, or few, to the maximum and back.

    python -m benchmarks.burst [--clients 100] [--replicas 3] [--min-replicas 0] [--json]

Starts a Ray cluster of its own and the application, waits until all replicas have gone that may, and lets all clients
ask at once, each for a stream. A client that gets 429 waits as long as Retry-After says and asks again. Then it waits
until the pool is as it was. Every request must end whole.

Printed: time to first token from the first try (median, 90th and 99th percentile, worst) and from the try that was
taken; tries and refusals; when the first replica and the most of them were up; how long the way back took; and the
cold start by part. On a machine with fewer cores than replicas they share them: the figures show the mechanism and not
a speed."""

import argparse
import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.common.percentiles import percentile

PROMPT_TOKENS = 200


@dataclass(slots=True)
class Outcome:
    """One client's. Seconds from the start of the burst's first try; first_token_s, taken_s: None if it was never
    served."""

    tries: int = 0
    retry_after: list[int] = field(default_factory=list)
    taken_s: float | None = None
    first_token_s: float | None = None
    tokens: int = 0
    comments: int = 0
    done: bool = False
    error: str | None = None


async def ask(http: httpx.AsyncClient, index: int, max_tokens: int, begin: float) -> Outcome:
    outcome = Outcome()
    prompt = [5 + (index * 31 + i) % 200 for i in range(PROMPT_TOKENS)]
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    while outcome.tries < 50:
        outcome.tries += 1
        started = time.perf_counter()
        async with http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code == 429:
                outcome.retry_after.append(int(response.headers["retry-after"]))
                await response.aread()
            else:
                await _read(response, outcome, begin)
                outcome.taken_s = started - begin
                return outcome
        await asyncio.sleep(outcome.retry_after[-1])
    outcome.error = f"sent away {outcome.tries} times"
    return outcome


async def _read(response: httpx.Response, outcome: Outcome, begin: float) -> None:
    if response.status_code != 200:
        outcome.error = (await response.aread()).decode()
        return
    async for line in _lines(response):
        if line.startswith("data: {"):
            if outcome.first_token_s is None:
                outcome.first_token_s = time.perf_counter() - begin
            chunk = json.loads(line[6:])
            if "error" in chunk:
                outcome.error = str(chunk["error"])
            elif chunk.get("usage"):
                outcome.tokens = chunk["usage"]["completion_tokens"]
        elif line.startswith(":"):
            outcome.comments += 1
        outcome.done |= line == "data: [DONE]"


async def _lines(response: httpx.Response) -> AsyncIterator[str]:
    """httpx's own would split at the line separators of Unicode too, which a text may have."""
    rest = b""
    async for data in response.aiter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line.decode()


@dataclass(slots=True)
class Course:
    """The number of running engine replicas over time: (seconds from the start of the burst, count) at each change."""

    counts: list[tuple[float, int]] = field(default_factory=list)
    targets: list[tuple[float, int]] = field(default_factory=list)

    def first(self, count: int) -> float | None:
        return next((round(at, 2) for at, running in self.counts if running >= count), None)

    def first_target(self, count: int) -> float | None:
        return next((round(at, 2) for at, target in self.targets if target >= count), None)

    @property
    def most(self) -> int:
        return max((count for _, count in self.counts), default=0)


async def watch(course: Course, begin: float) -> None:
    """Follow the engine deployment until cancelled."""
    while True:
        running, target = await asyncio.to_thread(replicas)
        at = time.perf_counter() - begin
        if not course.counts or course.counts[-1][1] != running:
            course.counts.append((at, running))
        if not course.targets or course.targets[-1][1] != target:
            course.targets.append((at, target))
        await asyncio.sleep(0.1)


def replicas() -> tuple[int, int]:
    """Engine replicas that run, and all there are: starting and stopping too."""
    from ray import serve

    states = serve.status().applications["nanoserve"].deployments["engine"].replica_states
    return states.get("RUNNING", 0), sum(count for state, count in states.items() if state != "STOPPING")


async def burst(url: str, clients: int, max_tokens: int) -> tuple[list[Outcome], Course]:
    course, begin = Course(), time.perf_counter()
    watching = asyncio.ensure_future(watch(course, begin))
    limits = httpx.Limits(max_connections=clients)
    try:
        async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as http:
            outcomes = await asyncio.gather(*(ask(http, i, max_tokens, begin) for i in range(clients)))
    finally:
        watching.cancel()
    return outcomes, course


def wait_for(count: int, within_s: float) -> float:
    """Seconds until so many engine replicas are left."""
    began = time.monotonic()
    while replicas() != (count, count):
        if time.monotonic() - began > within_s:
            raise TimeoutError(f"{replicas()} replicas after {within_s} s")
        time.sleep(0.1)
    return time.monotonic() - began


def report(outcomes: list[Outcome], course: Course, startups: list[Any], back_s: float) -> dict[str, Any]:
    whole = [outcome for outcome in outcomes if outcome.done and outcome.error is None]
    first = sorted(outcome.first_token_s or 0.0 for outcome in whole)
    taken = sorted((outcome.first_token_s or 0.0) - (outcome.taken_s or 0.0) for outcome in whole)

    def percentiles(values: list[float]) -> dict[str, float]:
        at = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
        return {name: round(percentile(values, share), 2) for name, share in at.items()}

    told = [seconds for outcome in outcomes for seconds in outcome.retry_after]
    return {
        "clients": len(outcomes),
        "whole": len(whole),
        "tries": sum(outcome.tries for outcome in outcomes),
        "refusals": len(told),
        "retry_after_s": [min(told), max(told)] if told else None,
        "ttft_s": percentiles(first),
        "ttft_of_the_taken_try_s": percentiles(taken),
        "keep_alives": sum(outcome.comments for outcome in outcomes),
        "replicas": course.most,
        "first_asked_for_s": course.first_target(1),
        "first_up_s": course.first(1),
        "all_asked_for_s": course.first_target(course.most),
        "all_up_s": course.first(course.most),
        "back_s": round(back_s, 1),
        "cold_start_s": [
            {"process and imports": round(times.process_s, 2), "engine": round(times.load_s, 2)} for times in startups
        ],
    }


def measure(
    url: str, clients: int, max_tokens: int, least: int, engine_calls: Callable[[str], Awaitable[list[Any]]]
) -> Any:
    async def run() -> tuple[list[Outcome], Course, list[Any]]:
        outcomes, course = await burst(url, clients, max_tokens)
        return outcomes, course, await engine_calls("startup_times")

    outcomes, course, startups = asyncio.run(run())
    return outcomes, report(outcomes, course, startups, wait_for(least, 180))


async def ask_replicas(method: str) -> list[Any]:
    from ray import serve

    handle = serve.get_deployment_handle("engine", app_name="nanoserve")
    answers: list[Any] = await handle.broadcast(method).results_async(timeout_s=10)
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--replicas", type=int, default=3, help="at most so many")
    parser.add_argument("--min-replicas", type=int, default=0, help="at least so many")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    import ray
    from ray import serve

    import app

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, namespace="serve")
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        settings = {
            "model": options.model, "min_replicas": options.min_replicas, "max_replicas": options.replicas,
            "max_model_len": 1024,
            "max_num_seqs": 16, "num_threads": 1, "downscale_delay_s": 10, "downscale_to_zero_delay_s": 10,
            "max_queue_size": 32, "kv_cache_memory_bytes": 2**29,
        }  # fmt: skip
        serve.run(app.build(settings), name="nanoserve", route_prefix="/")
        wait_for(options.min_replicas, 120)
        url = f"http://127.0.0.1:{port}"
        _, told = measure(url, options.clients, options.max_tokens, options.min_replicas, ask_replicas)
        print(json.dumps(told, indent=None if options.json else 2))
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
