"""A client that costs little: completions streamed over plain sockets, and looked into when all is over."""

import asyncio
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

EVENT = b"data: {"


class Streamed(NamedTuple):
    """Seconds from the request to the first event and to the end, and the tokens that the server counted."""

    first: float
    whole: float
    tokens: int


async def stream(port: int, model: str, prompt: Sequence[int], max_tokens: int) -> Streamed:
    """One greedy completion of `max_tokens` tokens on a connection of its own.

    Raises `RuntimeError` with the answer if it is no stream, or has no usage at its end.
    """
    body = {"model": model, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    payload = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    start = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head.encode() + payload)
        received, first = bytearray(), 0.0
        while data := await reader.read(1 << 16):
            received += data
            if not first and EVENT in received:
                first = time.perf_counter()
        end = time.perf_counter()
    finally:
        writer.close()
    return Streamed(first - start, end - start, completion_tokens(bytes(received)))


def completion_tokens(answer: bytes) -> int:
    """What the usage in an answer of server-sent events says. Raises `RuntimeError`, see `stream`."""
    headers, _, body = answer.partition(b"\r\n\r\n")
    if b" 200 " not in headers.partition(b"\r\n")[0]:
        raise RuntimeError(f"the server answered {answer[:500]!r}")
    if b"transfer-encoding: chunked" in headers.lower():
        body = _dechunked(body)
    counts = [
        event["usage"]["completion_tokens"]
        for line in body.splitlines()
        if line.startswith(EVENT) and (event := json.loads(line[len(b"data: ") :])).get("usage")
    ]
    if not counts:
        raise RuntimeError(f"the stream has no usage: it ends {body[-500:]!r}")
    return int(counts[-1])


def _dechunked(body: bytes) -> bytes:
    parts = []
    while body:
        size, _, body = body.partition(b"\r\n")
        length = int(size.partition(b";")[0], 16)
        if not length:
            break
        parts.append(body[:length])
        body = body[length + 2 :]
    return b"".join(parts)


def get_json(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as response:
        return json.load(response)


def wait_until_served(port: int, seconds: float, check: Callable[[], None]) -> str:
    """The name of the model that the server has, once it has one. `check` raises if the server has ended.

    Raises `TimeoutError`.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        check()
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10).close()
            return str(get_json(f"http://127.0.0.1:{port}/v1/models")["data"][0]["id"])
        except (OSError, urllib.error.URLError):
            time.sleep(0.1)
    raise TimeoutError(f"nothing is served on port {port} after {seconds:.0f} s")
