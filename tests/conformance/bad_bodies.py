"""Ten thousand generated requests over every route: no 5xx, no hang, gauges at zero after, memory flat."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version

import httpx

from tests.bodies import Request, generated
from tests.conformance.report import Outcome, SuiteResult
from tests.conformance.server import Running

COUNT = 10_000
WARM_UP = 2_000
"""Requests before memory is measured first: imports, caches and the KV pool's pages come with use."""

CLIENTS = 8
LIMIT_S = 60
"""Of one request; and beyond what any of these may take, a hang."""

MAX_GROWTH_MIB = 64


def run(server: Running) -> SuiteResult:
    found = asyncio.run(_send(server, generated(WARM_UP)))
    server.wait_idle()
    before = server.memory()
    found += asyncio.run(_send(server, generated(COUNT - WARM_UP, first_seed=1000)))
    held, after = server.wait_idle(), server.memory()
    growth = {name: after[name] - size for name, size in before.items()}
    statuses = Counter(status for _, status in found)
    failed = [request for request, status in found if isinstance(status, str) or status >= 500]
    told = ", ".join(f"{status}: {count}" for status, count in sorted(statuses.items(), key=str))
    memory = ", ".join(f"{name} {before[name]} to {after[name]} MiB" for name in before)
    outcomes = [
        Outcome("no 5xx and no hang", not failed, f"{len(found)} requests, by status {told}; {failed[:3] or ''}"),
        Outcome("gauges at zero", not any(held.values()), "" if not any(held.values()) else str(held)),
        Outcome(
            "memory flat", max(growth.values()) < MAX_GROWTH_MIB, f"after {WARM_UP} and {COUNT} requests: {memory}"
        ),
        Outcome("the next request is served", _serves(server)),
    ]
    return SuiteResult("bad bodies", f"hypothesis {version('hypothesis')}", outcomes)


async def _send(server: Running, requests: Iterator[Request]) -> list[tuple[Request, int | str]]:
    """Each with its status, or with what went wrong instead of one."""
    found: list[tuple[Request, int | str]] = []
    async with httpx.AsyncClient(base_url=server.url, timeout=LIMIT_S) as http:

        async def client() -> None:
            for request in requests:
                status: int | str
                try:
                    answer = await http.request(request.method, request.path, content=request.body)
                    status = "error in a stream" if b"event: error" in answer.content else answer.status_code
                except httpx.HTTPError as error:
                    status = repr(error)
                found.append((request, status))

        await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return found


def _serves(server: Running) -> bool:
    body = {"prompt": "The sea is", "max_tokens": 4, "temperature": 0}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=LIMIT_S).status_code == 200
