"""Kills engine replicas under load and checks that no stream notices more than a pause.

    python -m benchmarks.chaos [--kills 8] [--signal KILL] [--streams 60] [--replicas 3] [--ingresses 1]

Keeps so many streams going, of greedy and seeded requests of different lengths. Whenever the pool is whole again, one
replica gets SIGKILL, or SIGSTOP, after which it is there and says nothing; at last all at once. Each stream must end
complete and be what an undisturbed run of it was, whose greedy tokens are gap-checked against transformers; at the end
no gauge may stand above zero. Ends with status 1 if not. The model is tiny and random, so that processes and not
arithmetic are what is tried.
"""

import argparse
import asyncio
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.pools.local import Pool, kill, running
from tests import reference

STREAM_TIMEOUT_S = 120.0
"""Without a byte for so long, a stream counts as hung."""


@dataclass
class Report:
    """streams: that ended. wrong: what was not as it should be. pauses_s: the longest of each stream."""

    streams: int = 0
    tokens: int = 0
    kills: int = 0
    wrong: list[str] = field(default_factory=list)
    pauses_s: list[float] = field(default_factory=list)
    failovers: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.streams} streams, {self.tokens} tokens in {self.seconds:.0f} s; {self.kills} replicas struck, "
            f"{self.failovers} requests went on elsewhere; longest pause {max(self.pauses_s, default=0.0):.2f} s; "
            f"{len(self.wrong)} wrong"
        )


def bodies(pool: Pool, count: int, max_tokens: int) -> list[dict[str, Any]]:
    """Half greedy, whose prompts are chosen for clear gaps between the likeliest tokens, and half seeded."""
    rng = random.Random(0)
    found: list[dict[str, Any]] = []
    while len(found) < count:
        body: dict[str, Any] = {
            "prompt": [rng.randrange(3, 384) for _ in range(rng.randint(2, 60))],
            "max_tokens": rng.randint(max_tokens // 2, max_tokens),
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        if len(found) % 2:
            found.append(body | {"temperature": 1.0, "seed": len(found), "logprobs": 1})
            continue
        try:
            reference.greedy(pool.model, body["prompt"], body["max_tokens"])
        except AssertionError:
            continue
        found.append(body | {"temperature": 0})
    return found


class Traffic:
    """So many streams at a time, until told to stop."""

    def __init__(self, pool: Pool, requests: Sequence[dict[str, Any]], streams: int, report: Report) -> None:
        self._requests = requests
        self._report = report
        self._count = streams
        self._stop = False
        self._http = httpx.AsyncClient(
            base_url=pool.url,
            timeout=httpx.Timeout(30, read=STREAM_TIMEOUT_S),
            limits=httpx.Limits(max_connections=streams + 8),
        )
        self._expected: list[list[int]] = []

    async def __aenter__(self) -> "Traffic":
        for body in self._requests:
            ids, end, _ = await self._ask(body)
            if end != "length" or len(ids) != body["max_tokens"]:
                raise RuntimeError(f"the undisturbed run ended with {end!r} after {len(ids)} tokens")
            self._expected.append(ids)
        self._tasks = [asyncio.ensure_future(self._keep_asking(i)) for i in range(self._count)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop = True
        await asyncio.gather(*self._tasks)
        await self._http.aclose()

    async def _keep_asking(self, turn: int) -> None:
        while not self._stop:
            which = turn % len(self._requests)
            turn += 7
            report = self._report
            try:
                ids, end, pause_s = await self._ask(self._requests[which])
            except Exception as error:
                report.wrong.append(f"request {which}: {error!r}")
                continue
            report.streams += 1
            report.tokens += len(ids)
            report.pauses_s.append(pause_s)
            if ids != self._expected[which]:
                pairs = zip(ids, self._expected[which], strict=False)
                same = next((i for i, (found, expected) in enumerate(pairs) if found != expected), "the end")
                report.wrong.append(f"request {which}: {len(ids)} tokens, as undisturbed up to {same}")
            if end != "length":
                report.wrong.append(f"request {which} ended with {end!r}")

    async def _ask(self, body: dict[str, Any]) -> tuple[list[int], str, float]:
        """Token ids, how it ended, and the longest pause between two tokens."""
        ids: list[int] = []
        end, pause_s = "nothing", 0.0
        async with self._http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                raise RuntimeError(f"{response.status_code} {(await response.aread()).decode()[:300]}")
            heard_at = time.monotonic()
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                now = time.monotonic()
                pause_s, heard_at = max(pause_s, now - heard_at), now
                if line == "data: [DONE]":
                    return ids, end, pause_s
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise RuntimeError(chunk["error"]["message"])
                choice = chunk["choices"][0]
                ids += choice["token_ids"]
                end = choice["finish_reason"] or end
        raise RuntimeError(f"the stream broke off after {len(ids)} tokens")


async def torment(
    pool: Pool,
    kills: int,
    streams: int,
    max_tokens: int,
    say: Callable[[str], None],
    requests: int = 24,
    blow: signal.Signals = signal.SIGKILL,
) -> Report:
    """kills: rounds of them, of which the last is of all replicas at once. requests: different ones."""
    report = Report()
    asked = await asyncio.to_thread(bodies, pool, requests, max_tokens)
    start = time.monotonic()
    async with Traffic(pool, asked, streams, report):
        for i in range(kills):
            await asyncio.to_thread(pool.wait, pool.is_whole, 90, "the pool whole again")
            await asyncio.sleep(1.0)
            pids = await asyncio.to_thread(pool.engine_pids)
            last = i == kills - 1
            for pid in pids if last else pids[i % len(pids) :][:1]:
                kill(pid, blow)
                report.kills += 1
            say(f"{time.monotonic() - start:5.1f} s: {blow.name} to {'all replicas' if last else 'one'}; {report}")
        await asyncio.to_thread(pool.wait, pool.is_whole, 90, "the pool whole again")
    report.seconds = time.monotonic() - start
    try:
        await asyncio.to_thread(pool.wait, lambda: not pool.held(), 10, "gauges back at zero")
    except TimeoutError as error:
        report.wrong.append(f"{error}: {pool.held()}")
    report.failovers = int(pool.metrics()["nanoserve:failovers_total"])
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=9, help="rounds; the last is of all replicas at once")
    parser.add_argument("--signal", choices=("KILL", "STOP"), default="KILL")
    parser.add_argument("--streams", type=int, default=60)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--ingresses", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=300)
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        running(Path(folder), replicas=args.replicas, ingresses=args.ingresses) as pool,
    ):
        blow = signal.Signals[f"SIG{args.signal}"]
        report = asyncio.run(torment(pool, args.kills, args.streams, args.max_tokens, print, blow=blow))
    print(report, *report.wrong[:20], sep="\n")
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
