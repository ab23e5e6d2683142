"""The application without Ray: its ASGI app on a loopback socket, over an engine in the same process."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette

from app.admission import Admission, Budget
from app.http.doors import Doors
from app.http.routes import create_app
from app.prompts.chat import ChatSide
from app.prompts.chat_template import chat_templates
from app.replica import EngineReplica
from app.service.adapters import Adapters
from app.service.catalog import Catalog
from app.service.service import Service
from app.transport.serve_client import ServeEngineClient
from engine.engine import Engine
from engine.outputs import EngineStats
from engine.step_loop import StepLoop
from engine.text.tokenizer import Tokenizer
from tests.app.local_handle import LocalHandle


@dataclass
class Server:
    """A running application, and what is behind it."""

    http: httpx.AsyncClient
    replica: EngineReplica
    engine: Engine
    admission: Admission
    url: str

    async def chat(self, content: Any = "hello", **body: Any) -> httpx.Response:
        messages = [{"role": "user", "content": content}]
        return await self.http.post("/v1/chat/completions", json={"messages": messages} | body)

    async def complete(self, prompt: Any = "hello", **body: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"prompt": prompt} | body)

    async def stream(self, path: str, **body: Any) -> "Events":
        return parse_events(await self.http.post(path, json={"stream": True} | body))

    async def stream_chat(self, content: Any = "hello", **body: Any) -> "Events":
        return await self.stream("/v1/chat/completions", messages=[{"role": "user", "content": content}], **body)

    async def stream_complete(self, prompt: Any = "hello", **body: Any) -> "Events":
        return await self.stream("/v1/completions", prompt=prompt, **body)

    async def idle(self, within_s: float = 1.0) -> EngineStats:
        """Wait until nothing runs, waits or holds a block; fails if that takes longer than a client may notice."""
        await until(lambda: self._is_idle(), within_s, lambda: f"{self.replica.stats()}, {self.admission.outstanding}")
        return self.replica.stats()

    def _is_idle(self) -> bool:
        stats = self.replica.stats()
        in_engine = stats.num_running + stats.num_waiting + stats.live_blocks
        return in_engine + self.admission.outstanding + self.admission.waiting == 0


@dataclass
class Events:
    """The events of one stream: their data, and what stood in `event:` lines."""

    chunks: list[dict[str, Any]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    comments: int = 0
    done: bool = False
    status: int = 200

    @property
    def text(self) -> str:
        choices = [choice for chunk in self.chunks for choice in chunk.get("choices", ())]
        return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)

    @property
    def finish_reasons(self) -> list[str]:
        choices = [choice for chunk in self.chunks for choice in chunk.get("choices", ())]
        return [choice["finish_reason"] for choice in choices if choice["finish_reason"] is not None]

    @property
    def usage(self) -> dict[str, Any]:
        usage: dict[str, Any] = self.chunks[-1]["usage"]
        return usage


def parse_events(response: httpx.Response) -> Events:
    """Strict: whole events only, nothing after [DONE]."""
    events = Events(status=response.status_code)
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    *blocks, rest = response.text.split("\n\n")
    assert rest == ""
    for block in blocks:
        assert not events.done, "an event after [DONE]"
        for line in block.split("\n"):
            if line.startswith(":"):
                events.comments += 1
            elif line.startswith("event: "):
                events.names.append(line[7:])
            elif line == "data: [DONE]":
                events.done = True
            else:
                assert line.startswith("data: "), line
                events.chunks.append(json.loads(line[6:]))
    return events


async def until(condition: Callable[[], bool], within_s: float, state: Callable[[], str] = lambda: "") -> None:
    deadline = asyncio.get_running_loop().time() + within_s
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, f"not within {within_s} s: {state()}"
        await asyncio.sleep(0.005)


@asynccontextmanager
async def running(
    engine: Engine,
    tokenizer: Tokenizer,
    *,
    capacity: int | None = None,
    max_waiting: int = 64,
    stream_commit_s: float = 5.0,
    chat_template: str | None = None,
    tool_call_parser: Any = "auto",
    reasoning_parser: Any = "auto",
    doors: Doors | None = None,
    lora_modules: Mapping[str, str] | None = None,
    allow_updates: bool = False,
    send_buffer: int | None = None,
) -> AsyncIterator[Server]:
    """Serve `engine` on a loopback socket. At the end nothing may be left in it.

    send_buffer: bytes that the system takes for a client who does not read; by default megabytes.
    """
    replica = EngineReplica(lambda on_output: StepLoop(engine, on_output))
    client = ServeEngineClient(LocalHandle([replica]))
    admission = Admission(Budget(capacity or engine.info.max_num_seqs * 5 // 4), max_waiting)
    chat_side = ChatSide(chat_templates(tokenizer, chat_template), tool_call_parser, reasoning_parser)
    adapters = Adapters("tiny", client, allow_updates)
    await adapters.load_all(lora_modules or {})
    service = Service("tiny", tokenizer, client, await client.limits(), admission, chat_side, adapters=adapters)
    try:
        async with (
            listening(create_app(Catalog([service]), stream_commit_s, doors), send_buffer) as url,
            httpx.AsyncClient(base_url=url, timeout=30) as http,
        ):
            yield Server(http, replica, engine, admission, url)
    finally:
        replica.close()


@asynccontextmanager
async def listening(app: Starlette, send_buffer: int | None = None) -> AsyncIterator[str]:
    """The URL of `app` on a loopback socket."""
    # By its protocol asyncio knows it for TCP and sends each write at once; else an answer waits 40 ms for the client.
    door = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    if send_buffer is not None:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    door.bind(("127.0.0.1", 0))
    server = _PromptServer(uvicorn.Config(app, log_level="warning"))
    task = asyncio.ensure_future(server.serve([door]))
    await until(lambda: server.started, 5.0)
    try:
        yield f"http://127.0.0.1:{door.getsockname()[1]}"
    finally:
        server.ends.set()
        await task


class _PromptServer(uvicorn.Server):
    """Without the tenths of a second that uvicorn sleeps when it ends, since hundreds of tests start one."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ends = asyncio.Event()

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self.ends.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        await until(lambda: not (self.server_state.connections or self.server_state.tasks), 10.0)
        await self.lifespan.shutdown()
