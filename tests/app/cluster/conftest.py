"""One cluster, with Serve on it, for all modules here: each finds it empty and leaves it so."""

import asyncio
from collections.abc import Callable, Iterator

import httpx
import pytest
import ray
from ray import serve

from benchmarks.pools.local import APP, Pool, local_cluster, session_logs
from tests.app.harness import Events, parse_events, until
from tests.live_server import free_port

PORT = free_port()
URL = f"http://127.0.0.1:{PORT}"


def went_on() -> int:
    """Requests that went on elsewhere, by the logs, since the counters of an ingress end with it."""
    files = session_logs().glob("serve/replica_*ingress*.log")
    return sum(file.read_text(errors="replace").count("goes on elsewhere") for file in files)


def ask_and(pool: Pool, act: Callable[[], object], *max_tokens: int) -> list[Events]:
    """Streams of these lengths, whole; once all have begun, `act` runs. None stands still for long."""
    begun = 0

    async def ask(http: httpx.AsyncClient, token_id: int, length: int) -> Events:
        nonlocal begun
        body = {"prompt": [token_id], "max_tokens": length, "ignore_eos": True, "stream": True}
        async with http.stream("POST", "/v1/completions", json=body) as response:
            parts = []
            async for part in response.aiter_bytes():
                begun += not parts
                parts.append(part)
        return parse_events(httpx.Response(response.status_code, headers=response.headers, content=b"".join(parts)))

    async def ask_all() -> list[Events]:
        async with httpx.AsyncClient(base_url=pool.url, timeout=15) as http:
            asked = [asyncio.ensure_future(ask(http, *each)) for each in enumerate(max_tokens, start=5)]
            await until(lambda: begun == len(asked), 30)
            await asyncio.to_thread(act)
            return await asyncio.gather(*asked)

    return asyncio.run(ask_all())


@pytest.fixture(scope="package")
def cluster() -> Iterator[None]:
    with local_cluster(num_cpus=4, port=PORT):
        yield


@pytest.fixture(scope="module", autouse=True)
def _empty() -> Iterator[None]:
    yield
    if ray.is_initialized() and APP in serve.status().applications:
        serve.delete(APP)
