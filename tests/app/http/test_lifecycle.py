"""Clients that leave, engines that fail, servers that are full: what is freed and what is told."""

import asyncio
import json
import socket
import threading
import time
from typing import Any

import httpx
import pytest

from engine.step import StepPlan
from engine.text.tokenizer import Tokenizer
from tests.app.conftest import Serve
from tests.app.harness import Server, parse_events, until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LONG = {"prompt": "hello", "max_tokens": 100, "ignore_eos": True}


class Gate:
    """A model that computes a step only while the gate is open."""

    def __init__(self, step_s: float = 0.0) -> None:
        self.open = threading.Event()
        self.open.set()
        self.step_s = step_s
        self.steps = 0
        self.is_held = False

    def __call__(self, _: StepPlan) -> None:
        self.is_held = True
        assert self.open.wait(10)
        self.is_held = False
        time.sleep(self.step_s)
        self.steps += 1


class Connection:
    """A client on a bare socket, which leaves when it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self._writer = writer

    @classmethod
    async def post(cls, server: Server, path: str, body: dict[str, Any], missing: int = 0) -> "Connection":
        """missing: bytes of the body that are announced and not sent."""
        host, port = server.url.removeprefix("http://").split(":")
        end = socket.socket()
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # little is on its way to one who does not read
        end.connect((host, int(port)))
        reader, writer = await asyncio.open_connection(sock=end)
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + data[: len(data) - missing])
        await writer.drain()
        return cls(reader, writer)

    def leave(self) -> None:
        self._writer.transport.abort()


async def test_leaving_in_mid_stream_frees_everything(scripted: Serve) -> None:
    async with scripted("word " * 50, before_step=Gate(0.005)) as server:
        connection = await Connection.post(server, COMPLETIONS, LONG | {"stream": True})
        await connection.reader.readuntil(b'"text":')
        assert server.replica.stats().live_blocks > 0
        connection.leave()
        await server.idle()
        assert server.replica.stats().generation_tokens < 100
        assert (await server.chat(max_tokens=2)).status_code == 200


async def test_leaving_without_a_stream_frees_everything(scripted: Serve) -> None:
    async with scripted("word " * 50, before_step=Gate(0.005)) as server:
        for path, body in ((COMPLETIONS, LONG), (CHAT, {"messages": [{"role": "user", "content": "hi"}]})):
            connection = await Connection.post(server, path, body | {"ignore_eos": True})
            await until(lambda: server.replica.stats().num_running == 1, 5)
            connection.leave()
            await server.idle()
        assert (await server.chat(max_tokens=2)).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_the_queue_of_the_ingress_gives_the_place_back(scripted: Serve, stream: bool) -> None:
    async with scripted(before_step=Gate(0.005), capacity=1) as server:
        first = asyncio.ensure_future(server.complete(**LONG))
        await until(lambda: server.replica.stats().num_running == 1, 5)
        connection = await Connection.post(server, COMPLETIONS, LONG | {"stream": stream})
        await until(lambda: server.admission.waiting == 1, 5)
        connection.leave()
        await until(lambda: server.admission.waiting == 0, 1)
        assert (await first).json()["usage"]["completion_tokens"] == 100
        await server.idle()


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_the_queue_of_the_engine_gives_the_place_back(scripted: Serve, stream: bool) -> None:
    async with scripted(before_step=Gate(0.005), max_num_seqs=1, capacity=2) as server:
        first = asyncio.ensure_future(server.complete(**LONG))
        await until(lambda: server.replica.stats().num_running == 1, 5)
        connection = await Connection.post(server, COMPLETIONS, LONG | {"stream": stream})
        await until(lambda: server.replica.stats().num_waiting == 1, 5)
        connection.leave()
        await until(lambda: server.replica.stats().num_waiting == 0, 1)
        assert (await first).json()["usage"]["completion_tokens"] == 100
        await server.idle()


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_while_the_prompt_is_read_frees_everything(scripted: Serve, stream: bool) -> None:
    gate = Gate(0.02)
    async with scripted(before_step=gate, max_num_batched_tokens=8) as server:
        body = LONG | {"prompt": [5 + i for i in range(100)], "stream": stream}
        connection = await Connection.post(server, COMPLETIONS, body)
        await until(lambda: gate.steps >= 2, 5)
        connection.leave()
        await server.idle()
        assert server.replica.stats().generation_tokens == 0


async def test_leaving_with_several_prompts_frees_all_of_them(scripted: Serve) -> None:
    async with scripted(before_step=Gate(0.005), max_num_seqs=2, capacity=3) as server:
        for stream in (False, True):
            body = LONG | {"prompt": ["a", "b", "c", "d", "e"], "stream": stream}
            connection = await Connection.post(server, COMPLETIONS, body)
            await until(lambda: server.replica.stats().num_running == 2 and server.admission.waiting == 2, 5)
            connection.leave()
            await server.idle()


async def test_leaving_at_once_and_at_any_time_does_no_harm(scripted: Serve) -> None:
    async with scripted(before_step=Gate(0.001)) as server:
        for wait_s in [0, 0, 0.001, 0.002, 0.004, 0.008, 0.016]:
            for stream in (False, True):
                connection = await Connection.post(server, COMPLETIONS, LONG | {"max_tokens": 8, "stream": stream})
                await asyncio.sleep(wait_s)
                connection.leave()
        connection = await Connection.post(server, COMPLETIONS, LONG, missing=5)
        connection.leave()
        await server.idle()
        assert (await server.chat(max_tokens=2)).status_code == 200


class Faults:
    """Makes the steps fail that are named, once `due` is set."""

    def __init__(self, *failing: int, before_s: float = 0.0, due: threading.Event | None = None) -> None:
        self._failing = failing
        self._before_s = before_s
        self._due = due
        self._step = 0

    def __call__(self, _: StepPlan) -> None:
        self._step += 1
        if self._step in self._failing:
            time.sleep(self._before_s)
            assert self._due is None or self._due.wait(10)
            raise RuntimeError("a secret of the engine")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_fault_before_the_first_token_is_a_real_500(scripted: Serve, stream: bool) -> None:
    async with scripted(before_step=Faults(1)) as server:
        response = await server.chat(stream=stream)
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "engine_error"
        assert "secret" not in response.text
        assert (await server.chat(max_tokens=3)).status_code == 200
        await server.idle()


async def test_a_fault_in_mid_stream_is_an_error_event_and_no_done(scripted: Serve) -> None:
    read = threading.Event()  # else the fault may overtake the first token, and be a 500
    body = {"messages": [{"role": "user", "content": "hello"}], "stream": True, "max_tokens": 20}
    async with scripted("abcdefgh", before_step=Faults(4, due=read)) as server:
        parts = []
        async with server.http.stream("POST", CHAT, json=body) as response:
            async for part in response.aiter_bytes():
                parts.append(part)
                read.set()
        events = parse_events(httpx.Response(200, headers=response.headers, content=b"".join(parts)))
        assert response.status_code == 200
        assert events.names == ["error"]
        assert events.chunks[-1]["error"]["type"] == "server_error"
        assert not events.done
        assert not any(chunk["choices"][0]["finish_reason"] for chunk in events.chunks[:-1])
        assert (await server.chat(max_tokens=3)).status_code == 200
        await server.idle()


async def test_a_fault_without_a_stream_is_a_500_even_late(scripted: Serve) -> None:
    async with scripted("abcdefgh", before_step=Faults(4)) as server:
        assert (await server.chat(max_tokens=20)).status_code == 500
        await server.idle()


async def test_a_fault_after_the_status_went_out_is_an_error_event(scripted: Serve) -> None:
    async with scripted(before_step=Faults(1, before_s=0.2), stream_commit_s=0.05) as server:
        events = parse_events(await server.chat(stream=True))
        assert events.names == ["error"]
        assert not events.done
        await server.idle()


async def test_one_prompt_that_fails_ends_the_others_of_its_request(scripted: Serve) -> None:
    async with scripted("abcdefgh", before_step=Faults(4), max_num_seqs=1) as server:
        response = await server.complete(["a", "b", "c"], max_tokens=20)
        assert response.status_code == 500
        await server.idle()


async def test_the_status_comes_before_the_first_token_when_that_takes_long(
    scripted: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.http.streaming.KEEP_ALIVE_S", 0.05)
    gate = Gate()
    gate.open.clear()
    async with scripted("abc", before_step=gate, stream_commit_s=0.05) as server:
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 3}
        async with server.http.stream("POST", CHAT, json=body) as response:
            assert response.status_code == 200  # with no token made
            lines = response.aiter_lines()
            assert (await anext(lines)).startswith(":")
            gate.open.set()
            rest = [line async for line in lines]
        assert rest[-2] == "data: [DONE]"


async def test_a_full_server_answers_429_in_openais_body(scripted: Serve) -> None:
    gate = Gate()
    gate.open.clear()
    async with scripted(before_step=gate, capacity=1, max_waiting=1) as server:
        accepted = [asyncio.ensure_future(server.complete(**LONG | {"max_tokens": 5})) for _ in range(2)]
        await until(lambda: server.admission.waiting == 1, 5)
        for stream in (False, True):
            response = await server.chat(stream=stream)
            assert response.status_code == 429
            assert response.json()["error"]["type"] == "rate_limit_error"
            assert int(response.headers["retry-after"]) >= 1
        gate.open.set()
        assert [(await task).status_code for task in accepted] == [200, 200]
        assert (await server.chat(max_tokens=2)).status_code == 200


async def test_a_dead_engine_is_unhealthy_and_refuses(scripted: Serve) -> None:
    async with scripted(before_step=Faults(*range(1, 10))) as server:
        for _ in range(3):
            assert (await server.chat()).status_code == 500
        response = await server.http.get("/health")
        assert response.status_code == 503
        assert response.json()["error"]["type"] == "server_error"
        response = await server.chat()
        assert response.status_code == 503
        assert response.headers["retry-after"]


@pytest.mark.parametrize("prompt", ["x" * 10_000, ["x" * 100] * 1000])
async def test_tokenising_much_text_does_not_hold_up_the_others(
    real: Serve, monkeypatch: pytest.MonkeyPatch, prompt: Any
) -> None:
    started, go_on = threading.Event(), threading.Event()

    def slow_encode(*_: Any) -> list[int]:
        started.set()
        assert go_on.wait(10)
        return [5] * 2000

    monkeypatch.setattr(Tokenizer, "encode", slow_encode)
    async with real(max_model_len=1024) as server:
        long = asyncio.ensure_future(server.complete(prompt))
        await until(started.is_set, 5)
        assert (await server.complete([5, 6], max_tokens=2)).status_code == 200
        go_on.set()
        assert (await long).json()["error"]["code"] == "context_length_exceeded"


async def test_mixed_traffic_answers_as_each_request_does_alone(real: Serve) -> None:
    async with real(max_num_seqs=8, num_gpu_blocks_override=24, block_size=8) as server:
        bodies = [
            {"prompt": [5 + (i * j) % 300 for j in range(1, 3 + i * 7 % 60)], "max_tokens": 1 + i * 5 % 23, "seed": i,
             "temperature": (i % 3) / 2}
            for i in range(60)
        ]  # fmt: skip
        alone = [(await server.complete(**body)).json()["choices"][0] for body in bodies]

        async def ask(i: int) -> tuple[str, str]:
            if i % 2:
                events = await server.stream_complete(**bodies[i])
                return events.text, events.finish_reasons[0]
            choice = (await server.complete(**bodies[i])).json()["choices"][0]
            return choice["text"], choice["finish_reason"]

        async def leave(i: int) -> None:
            connection = await Connection.post(
                server, COMPLETIONS, bodies[i] | {"max_tokens": 100, "stream": i % 2 == 0}
            )
            await asyncio.sleep(i / 1000)
            connection.leave()

        answers, _ = await asyncio.gather(
            asyncio.gather(*(ask(i) for i in range(60))), asyncio.gather(*(leave(i) for i in range(0, 60, 10)))
        )
        assert answers == [(choice["text"], choice["finish_reason"]) for choice in alone]
        await server.idle()


SMALL_BUFFERS = {
    "max_model_len": 100_000, "num_blocks": 30_000, "block_size": 16, "max_num_batched_tokens": 64, "send_buffer": 4096,
}  # fmt: skip
"""So long an output, and so little on its way to a client who does not read."""


async def test_a_client_that_reads_nothing_loses_its_place_and_its_connection(
    scripted: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("app.http.streaming.UNREAD_S", 0.3)
    monkeypatch.setattr("app.http.streaming.KEEP_ALIVE_S", 0.1)
    async with scripted("abcdefgh" * 4, capacity=1, **SMALL_BUFFERS) as server:
        idler = await Connection.post(server, COMPLETIONS, LONG | {"max_tokens": 90_000, "stream": True})
        await idler.reader.readuntil(b'"text":')
        idler.reader._transport.pause_reading()
        assert (await server.complete(max_tokens=2)).status_code == 200, "the only place was not given back"
        await server.idle()
        assert server.replica.stats().generation_tokens < 90_000
        assert "its client has read nothing" in caplog.text
        idler.reader._transport.resume_reading()
        assert b"data: [DONE]\n\n" not in await asyncio.wait_for(idler.reader.read(), 10)


@pytest.mark.parametrize("silent", [False, True])
async def test_a_client_that_goes_on_reading_in_time_loses_nothing(
    scripted: Serve, monkeypatch: pytest.MonkeyPatch, silent: bool
) -> None:
    """silent: the engine makes no token meanwhile, so that comments are what is not read."""
    monkeypatch.setattr("app.http.streaming.UNREAD_S", 30.0)
    monkeypatch.setattr("app.http.streaming.KEEP_ALIVE_S", 0.01)
    gate = Gate()
    async with scripted("abcdefgh" * 4, before_step=gate, **SMALL_BUFFERS) as server:
        idler = await Connection.post(server, COMPLETIONS, LONG | {"max_tokens": 2000, "stream": True})
        await idler.reader.readuntil(b'"text":')
        idler.reader._transport.pause_reading()
        if silent:
            gate.open.clear()
        await asyncio.sleep(0.3)
        gate.open.set()
        idler.reader._transport.resume_reading()
        assert b"data: [DONE]\n\n" in await asyncio.wait_for(idler.reader.read(), 10)
        await server.idle()


async def test_a_body_that_does_not_come_is_a_408_and_holds_no_place(
    scripted: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.http.streaming.BODY_S", 0.1)
    async with scripted(capacity=1, max_waiting=0) as server:
        slow = [await Connection.post(server, COMPLETIONS, LONG, missing=5) for _ in range(20)]
        assert (await server.chat(max_tokens=2)).status_code == 200
        for connection in slow:
            head, _, body = (await asyncio.wait_for(connection.reader.read(), 5)).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 408 ")
            assert json.loads(body)["error"]["code"] == "body_too_slow"
        assert (await server.chat(max_tokens=2)).status_code == 200


async def test_a_reader_that_stops_reading_is_cut_off(scripted: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the whole way: what piles up is bounded, and the request does not run on for nobody."""
    monkeypatch.setattr("app.transport.token_stream.MAX_UNREAD_TOKENS", 64)
    async with scripted("abcdefgh" * 4, max_model_len=100_000, num_blocks=30_000, block_size=16) as server:
        limits = httpx.Limits(max_connections=1)
        async with httpx.AsyncClient(base_url=server.url, limits=limits, timeout=30) as client:
            body = LONG | {"max_tokens": 90_000, "stream": True}
            async with client.stream("POST", COMPLETIONS, json=body) as response:
                assert response.status_code == 200
                await until(lambda: server.replica.stats().num_running == 0, 20)
        await server.idle()
        assert server.replica.stats().generation_tokens < 90_000
