"""Generated requests to every route: no 5xx, no hang, and nothing left behind."""

import asyncio
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import httpx
import pytest

from tests.app.conftest import Serve
from tests.bodies import generated


async def test_no_body_breaks_the_server(scripted: Serve) -> None:
    async with scripted() as server:
        for request in generated(350):
            try:
                sent = server.http.request(request.method, request.path, content=request.body)
                response = await asyncio.wait_for(sent, 10)
            except httpx.HTTPError as error:
                pytest.fail(f"{request}: {error!r}")
            assert response.status_code < 500, (request, response.text)
            if response.status_code != 200:
                assert request.method == "HEAD" or set(response.json()["error"]) == {"message", "type", "param", "code"}
            elif response.headers["content-type"].startswith("text/event-stream"):
                assert "event: error" not in response.text, request
        await server.idle()
        assert (await server.chat(max_tokens=1)).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": "hello"}], "temperature": "warm"},
        {"messages": [{"role": "user", "content": "hello"}], "model": "of another server"},
        {"messages": [{"role": "user", "content": "a word " * 20_000}]},
        "no JSON object",
    ],
    ids=["wrong value", "unknown model", "too long", "no object"],
)
async def test_a_refused_body_is_freed_at_once(scripted: Serve, body: object) -> None:
    """Garbage collections are rare in an ingress: what waits for one must not hold bodies."""
    async with scripted() as server:
        with frames_of_garbage() as frames:
            assert (await server.http.post("/v1/chat/completions", json=body)).status_code in (400, 404)
    assert not [frame for frame in frames if "_answer" in frame or "parse" in frame]


@contextmanager
def frames_of_garbage() -> Iterator[list[str]]:
    """The functions whose frames a collection would have freed, once the block is left."""
    frames: list[str] = []
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield frames
        gc.collect()
        frames += [found.f_code.co_qualname for found in gc.garbage if isinstance(found, FrameType)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
