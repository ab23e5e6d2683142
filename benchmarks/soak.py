"""Mixed load for a long time: random requests, clients that leave at any moment, and requests that are wrong.

    python -m benchmarks.soak [--minutes 30] [--clients 32] [--replicas 2] [--ingresses 2]

Every answer must have the status it should; at the end nothing may be held, the memory of each process must not have
grown since its first quarter of an hour (or of the run, if that is shorter), and no log may have an error in it. Ends
with status 1 if not. The model is tiny and random.
"""

import argparse
import asyncio
import json
import random
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.pools.local import Pool, running, session_logs

SAMPLE_S = 5.0
MAX_GROWTH = 1.05
"""Of a process's memory, from the second quarter of the run to the last."""

BAD: list[tuple[dict[str, Any], int]] = [
    ({"prompt": [99999]}, 400),
    ({"prompt": []}, 400),
    ({"prompt": "a", "max_tokens": -1}, 400),
    ({"prompt": "a", "temperature": "hot"}, 400),
    ({"prompt": [5] * 5000}, 400),
    ({"prompt": "a", "model": "other"}, 404),
    ({"prompt": "a", "structured_outputs": {"regex": "("}}, 400),
    ({"prompt": "a", "stop_token_ids": [99999], "stream": True}, 400),
    ({"messages": []}, 400),
]


@dataclass
class Report:
    """answers: by what they were. memory: by process, in MiB, sampled over time."""

    answers: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    wrong: list[str] = field(default_factory=list)
    memory: dict[str, list[float]] = field(default_factory=dict)

    def check_memory(self) -> list[str]:
        """What each process had in the second quarter of the run and in the last; growth is a fault."""
        lines = []
        for name, values in self.memory.items():
            quarter = max(1, len(values) // 4)
            early, late = statistics.median(values[quarter : 2 * quarter]), statistics.median(values[-quarter:])
            lines.append(f"{name}: {early:.0f} MiB in the second quarter, {late:.0f} in the last")
            if late > early * MAX_GROWTH:
                self.wrong.append(f"memory grew: {lines[-1]}")
        return lines


def good(rng: random.Random) -> dict[str, Any]:
    body: dict[str, Any] = {
        "prompt": [rng.randrange(3, 384) for _ in range(rng.choice((2, 20, 200, 900)))],
        "max_tokens": rng.choice((1, 8, 40, 200)),
        "temperature": rng.choice((0, 0.7, 1.0)),
        "stream": rng.random() < 0.6,
    }
    extras: list[dict[str, Any]] = [
        {}, {}, {}, {"n": 3, "temperature": 1.0}, {"logprobs": 3}, {"stop": ["the", "a b"]},
        {"repetition_penalty": 1.2}, {"structured_outputs": {"regex": "[a-z]{3,40}"}}, {"prompt": ["hello", "hi", "x"]},
        {"top_p": 0.8, "seed": 5}, {"logit_bias": {"70": 5}},
    ]  # fmt: skip
    return body | rng.choice(extras)


async def client(http: httpx.AsyncClient, rng: random.Random, until: float, report: Report) -> None:
    while time.monotonic() < until:
        kind = rng.random()
        try:
            if kind < 0.15:
                await _ask_badly(http, rng, report)
            elif kind < 0.4:
                await _leave(http.base_url, rng, report)
            else:
                await _ask(http, good(rng), report)
        except Exception as error:
            report.wrong.append(repr(error))
        if rng.random() < 0.2:
            await asyncio.sleep(rng.random())


async def _ask(http: httpx.AsyncClient, body: dict[str, Any], report: Report) -> None:
    response = await http.post("/v1/completions", json=body)
    if response.status_code == 429:
        report.answers["429"] += 1
        await asyncio.sleep(float(response.headers["retry-after"]))
        return
    if response.status_code != 200:
        report.wrong.append(f"{response.status_code} {response.text[:200]} for {str(body)[:200]}")
        return
    if body["stream"]:
        ended = response.text.endswith("data: [DONE]\n\n") and "event: error" not in response.text
        report.tokens += response.text.count("data: ") - 1
    else:
        ended = all(choice["finish_reason"] for choice in response.json()["choices"])
        report.tokens += response.json()["usage"]["completion_tokens"]
    report.answers["stream" if body["stream"] else "whole"] += 1
    if not ended:
        report.wrong.append(f"not complete: {response.text[-200:]}")


async def _ask_badly(http: httpx.AsyncClient, rng: random.Random, report: Report) -> None:
    body, status = rng.choice(BAD)
    response = await http.post("/v1/chat/completions" if "messages" in body else "/v1/completions", json=body)
    report.answers[str(status)] += 1
    if response.status_code not in (status, 429):
        report.wrong.append(f"{response.status_code} instead of {status} for {str(body)[:200]}")


async def _leave(url: httpx.URL, rng: random.Random, report: Report) -> None:
    """Over a connection of its own: httpx does not give the place of a cancelled request in its pool back each time."""
    async with httpx.AsyncClient(base_url=url) as http:
        asked = asyncio.ensure_future(http.post("/v1/completions", json=good(rng) | {"max_tokens": 500}))
        await asyncio.sleep(rng.choice((0, 0.001, 0.005, 0.02, 0.1, 0.4)))
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
    report.answers["left"] += 1


async def _watch(pool: Pool, until: float, report: Report) -> None:
    engines, ingresses = await asyncio.to_thread(lambda: (pool.engine_pids(), pool.ingress_pids()))
    pids = {f"engine {i}": pid for i, pid in enumerate(engines)} | {f"ingress {i}": p for i, p in enumerate(ingresses)}
    while time.monotonic() < until:
        for name, pid in pids.items():
            report.memory.setdefault(name, []).append(_resident_mib(pid))
        await asyncio.sleep(SAMPLE_S)


def _resident_mib(pid: int) -> float:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


async def soak(pool: Pool, minutes: float, clients: int, report: Report) -> None:
    until = time.monotonic() + 60 * minutes
    async with httpx.AsyncClient(base_url=pool.url, timeout=120) as http:
        await asyncio.gather(
            _watch(pool, until, report), *(client(http, random.Random(i), until, report) for i in range(clients))
        )


def log_errors(folder: Path) -> list[str]:
    """Error lines of the replicas' logs."""
    found = []
    for file in sorted(folder.glob("serve/replica_*.log")):
        lines = file.read_text(errors="replace").splitlines()
        found += [f"{file.name}: {line}" for line in lines if re.match(r"(ERROR|CRITICAL|Traceback)", line)]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--ingresses", type=int, default=2)
    args = parser.parse_args()
    report = Report()
    with (
        tempfile.TemporaryDirectory() as folder,
        running(Path(folder), replicas=args.replicas, ingresses=args.ingresses, max_num_seqs=16) as pool,
    ):
        asyncio.run(soak(pool, args.minutes, args.clients, report))
        try:
            pool.wait(lambda: not pool.held(), 10, "nothing held")
        except TimeoutError as error:
            report.wrong.append(f"{error}: {pool.held()}")
        values = pool.metrics()
        report.wrong += log_errors(session_logs())
    print(
        json.dumps(
            {"answers": report.answers, "tokens": report.tokens, "preemptions": values["vllm:num_preemptions_total"]}
        )
    )
    print(*report.check_memory(), f"live blocks {values['nanoserve:live_blocks']:.0f}", sep="\n")
    print(f"{len(report.wrong)} wrong", *report.wrong[:20], sep="\n")
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
