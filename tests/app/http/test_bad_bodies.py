"""Generated requests to every route: no 5xx, no hang, and nothing left behind."""

import asyncio

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
