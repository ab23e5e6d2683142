"""ray_configs/nginx.conf under the real nginx: nothing is held back, cut off or refused on the way."""

import asyncio
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from app.http.doors import Doors
from tests.app.conftest import Serve
from tests.app.harness import parse_events, until
from tests.app.http.test_lifecycle import Gate
from tests.live_server import REPOSITORY, free_port

CONF = REPOSITORY / "ray_configs" / "nginx.conf"

pytestmark = pytest.mark.skipif(
    shutil.which("nginx") is None and not os.environ.get("CI"), reason="nginx is a system package: ci/apt.txt has it"
)


@asynccontextmanager
async def in_front_of(url: str, folder: Path) -> AsyncIterator[str]:
    """nginx by our file, with other ports and folders in it; its URL."""
    port = free_port()
    text = CONF.read_text()
    for old, new in {
        "127.0.0.1:8000": url.removeprefix("http://"),
        "listen 8080": f"listen 127.0.0.1:{port}",
        "/run/nginx.pid": f"{folder}/pid",
        "/var/log/nginx": str(folder),
    }.items():
        assert old in text
        text = text.replace(old, new)
    (folder / "nginx.conf").write_text(text)
    process = subprocess.Popen(["nginx", "-p", folder, "-c", folder / "nginx.conf", "-g", "daemon off;"])
    try:
        await until(lambda: (folder / "pid").exists() or process.poll() is not None, 10)
        assert process.poll() is None
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(10)


async def test_answers_refusals_and_large_bodies_pass(scripted: Serve, tmp_path: Path) -> None:
    async with (
        scripted("hello there", doors=Doors(keys=["k"])) as server,
        in_front_of(server.url, tmp_path) as url,
        httpx.AsyncClient(base_url=url, timeout=30, headers={"Authorization": "Bearer k"}) as http,
    ):
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
        whole = await http.post("/v1/chat/completions", json=body)
        events = parse_events(await http.post("/v1/chat/completions", json=body | {"stream": True}))
        assert events.done
        assert events.text == whole.json()["choices"][0]["message"]["content"]
        large = await http.post("/v1/completions", json={"prompt": "hello " * 500_000})
        assert large.json()["error"]["code"] == "context_length_exceeded"
        assert (await http.get("/v1/models", headers={"Authorization": ""})).status_code == 401


async def test_a_client_that_leaves_ends_its_request(scripted: Serve, tmp_path: Path) -> None:
    async with (
        scripted("word " * 50, before_step=Gate(0.005)) as server,
        in_front_of(server.url, tmp_path) as url,
        httpx.AsyncClient(base_url=url, timeout=30) as http,
    ):
        body = {"prompt": "hello", "max_tokens": 100, "ignore_eos": True}
        for stream in (False, True):
            asked = asyncio.ensure_future(http.post("/v1/completions", json=body | {"stream": stream}))
            await until(lambda: server.replica.stats().num_running == 1, 5)
            asked.cancel()
            await server.idle()
        assert server.replica.stats().generation_tokens < 200


async def test_each_event_goes_out_when_it_comes_in(tmp_path: Path) -> None:
    """Of a server that asks for it by no header, as the application does: by the file alone."""
    go_on = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\ndata: 1\n\n")
        await writer.drain()
        await go_on.wait()
        writer.write(b"data: 2\n\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with (
        server,
        in_front_of(f"http://{host}:{port}", tmp_path) as url,
        httpx.AsyncClient(timeout=10, headers={"Accept-Encoding": "gzip"}) as http,
        http.stream("GET", url) as response,
    ):
        parts = response.aiter_raw()
        assert await anext(parts) == b"data: 1\n\n"
        go_on.set()
        assert b"".join([part async for part in parts]) == b"data: 2\n\n"
