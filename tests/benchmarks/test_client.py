"""The benchmarks' HTTP client against answers in both framings."""

import asyncio

import pytest

from benchmarks.servers.client import completion_tokens, stream

EVENTS = (
    b'data: {"choices": [{"text": "a"}], "usage": null}\n\n'
    b'data: {"choices": [], "usage": {"completion_tokens": 7}}\n\ndata: [DONE]\n\n'
)
OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


def chunked(body: bytes, size: int) -> bytes:
    parts = [body[start : start + size] for start in range(0, len(body), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


@pytest.mark.parametrize("size", [1, 10, 1000])
def test_usage_is_read_across_chunks(size: int) -> None:
    assert completion_tokens(OK + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(EVENTS, size)) == 7


def test_usage_is_read_without_chunks() -> None:
    assert completion_tokens(OK + b"\r\n" + EVENTS) == 7


@pytest.mark.parametrize("answer", [b"HTTP/1.1 429 Too Many Requests\r\n\r\n{}", OK + b"\r\ndata: [DONE]\n\n", b""])
def test_an_answer_that_is_no_whole_stream_is_an_error(answer: bytes) -> None:
    with pytest.raises(RuntimeError):
        completion_tokens(answer)


async def test_first_event_is_timed_apart_from_the_end() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK + b"\r\n" + EVENTS[:60])
        await writer.drain()
        await asyncio.sleep(0.2)
        writer.write(EVENTS[60:])
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        done = await stream(server.sockets[0].getsockname()[1], "m", [1, 2], 7)
    assert done.tokens == 7
    assert done.whole - done.first > 0.1
