"""What a token costs between the engine and the client: one server-sent event a token, an engine that costs nothing.

    python -m benchmarks.http_cost [--servers ours one-hop]

Four servers, each in turn on the same machine, with the same client:

ours: HAProxy, our ingress, the transport, and an engine replica whose tokens are made at no cost.
one-hop: HAProxy and one replica that streams a constant event: the least that Serve can do.
one-hop-in-steps: the same, but with the events of all streams at the same moments, as an engine makes its tokens: what
    of a first event's time is due to that. Only paced: without a pace it is one-hop.
two-hops: Ray's defaults, its Python proxy, an ingress and an engine, a message a token.

saturated: 64 streams without pause, events a second. paced: streams of 50 tokens a second that arrive as a Poisson
process, 64 at a time on average; time to the first event and the gaps between events. Each is measured of a server of
its own: one that cannot keep the pace would still be busy with the first when it is asked for the second.

parts: the same work of ours in one process, piece by piece, in us a token (see `benchmarks.http_parts`).
"""

import argparse
import asyncio
import gc
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.common.percentiles import percentile
from benchmarks.http_parts import parts
from benchmarks.servers.processes import HAPROXY
from benchmarks.throughput import machine

STREAMS = 64
RATE = 50
SATURATED_S = 6.0
PACED_S = 24.0
PACED_TOKENS = 100

END = b"0\r\n\r\n"
"""Of a chunked body: how a stream says that it is complete."""

ENVIRONMENTS: dict[str, dict[str, str]] = {
    "ours": HAPROXY,
    "one-hop": HAPROXY,
    "one-hop-in-steps": HAPROXY,
    "two-hops": {},
}


class Client(asyncio.Protocol):
    """One request on a bare socket. It counts events and does nothing else: the server has the same two cores.

    at: when each piece of data came, and how many events were in it.
    """

    def __init__(self, max_tokens: int, rate: int) -> None:
        body = json.dumps(
            {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": max_tokens, "seed": rate, "stream": True}
        )
        self._request = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}"
        ).encode()
        self._tail = b""
        self.done = False
        self.status = b""
        self.started = time.perf_counter()
        self.at: list[tuple[float, int]] = []
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self.status:
            self.status = data[9:12]
        text = self._tail + data
        if data.endswith(END):
            self.done = True
            self.connection_lost(None)
        events = text.count(b'"choices"')
        self._tail = text[-9:] if not text.endswith(b'"choices"') else b""
        if events:
            self.at.append((time.perf_counter(), events))

    def connection_lost(self, _: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)

    @property
    def events(self) -> int:
        return sum(count for _, count in self.at)


async def connect(port: int, max_tokens: int, rate: int) -> Client:
    _, client = await asyncio.get_running_loop().create_connection(lambda: Client(max_tokens, rate), "127.0.0.1", port)
    return client


async def saturated(port: int) -> dict[str, float]:
    clients = [await connect(port, 900_000, 0) for _ in range(STREAMS)]
    await asyncio.sleep(2.0)
    before, start = sum(client.events for client in clients), time.perf_counter()
    await asyncio.sleep(SATURATED_S)
    count, seconds = sum(client.events for client in clients) - before, time.perf_counter() - start
    for client in clients:
        client.transport.abort()
    if any(client.status != b"200" for client in clients):
        raise RuntimeError(f"not all streams began: {[client.status for client in clients]}")
    return {"events_s": round(count / seconds), "us_event": round(1e6 * seconds / count, 1)}


async def paced(port: int) -> dict[str, float]:
    rng, clients = random.Random(0), []
    end = time.perf_counter() + PACED_S
    while time.perf_counter() < end:
        clients.append(await connect(port, PACED_TOKENS, RATE))
        await asyncio.sleep(rng.expovariate(STREAMS * RATE / PACED_TOKENS))
    await asyncio.wait([client.closed for client in clients], timeout=20)
    incomplete = [(client.status, client.events, client.done) for client in clients if not client.done]
    if incomplete:
        raise RuntimeError(f"{len(incomplete)} streams were not complete: {incomplete[:5]}")
    first = sorted(client.at[0][0] - client.started for client in clients)
    gaps = sorted(b[0] - a[0] for client in clients for a, b in zip(client.at, client.at[1:], strict=False))
    return {
        "streams": len(clients),
        "events_per_stream": round(sum(client.events for client in clients) / len(clients), 1),
        "ttft_p50_ms": _ms(first, 0.5),
        "ttft_p99_ms": _ms(first, 0.99),
        "gap_p50_ms": _ms(gaps, 0.5),
        "gap_p99_ms": _ms(gaps, 0.99),
    }


def _ms(values: Sequence[float], share: float) -> float:
    return round(1000 * percentile(values, share), 2)


@contextmanager
def server(name: str) -> Iterator[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.servers.no_engine", name, str(port)],
        env=os.environ | ENVIRONMENTS[name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.strip() == "ready":
                break
        else:
            raise RuntimeError(f"{name} did not start")
        yield port
    finally:
        process.stdin.close()
        process.wait(60)


@dataclass
class Figures:
    name: str
    saturated: dict[str, float]
    paced: dict[str, float]


def _measure(name: str, part: Callable[[int], Awaitable[dict[str, float]]]) -> dict[str, float]:
    async def drive(port: int) -> dict[str, float]:
        await asyncio.sleep(2.0)  # HAProxy takes its new backends up by a restart
        first = [await connect(port, 4, 0) for _ in range(STREAMS)]
        await asyncio.wait([client.closed for client in first], timeout=20)
        await asyncio.sleep(1.0)
        return await part(port)

    with server(name) as port:
        return asyncio.run(drive(port))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", nargs="+", choices=[*ENVIRONMENTS], default=[*ENVIRONMENTS])
    args = parser.parse_args()
    print(json.dumps(machine()))
    print(json.dumps({"parts_us_token": parts()}), flush=True)
    gc.disable()  # a collection in the client would look like a pause of the server
    found = {}
    for name in args.servers:
        fast = {} if name == "one-hop-in-steps" else _measure(name, saturated)
        figures = found[name] = Figures(name, fast, _measure(name, paced))
        print(json.dumps({"server": name} | figures.saturated | figures.paced), flush=True)
    if len(found) == len(ENVIRONMENTS):
        mine = found["ours"]
        print(
            json.dumps(
                {
                    "events_over_one_hop": round(
                        mine.saturated["events_s"] / found["one-hop"].saturated["events_s"], 2
                    ),
                    "events_over_two_hops": round(
                        mine.saturated["events_s"] / found["two-hops"].saturated["events_s"], 2
                    ),
                    "ttft_p99_over_one_hop": round(
                        mine.paced["ttft_p99_ms"] / found["one-hop"].paced["ttft_p99_ms"], 2
                    ),
                    "ttft_p99_over_one_hop_in_steps": round(
                        mine.paced["ttft_p99_ms"] / found["one-hop-in-steps"].paced["ttft_p99_ms"], 2
                    ),
                }
            )
        )


if __name__ == "__main__":
    main()
