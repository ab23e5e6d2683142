"""Generated bodies over every route that takes one: no 5xx, no hang, and nothing left behind."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.openai.openapi import openapi
from tests.app.conftest import Serve

SCHEMAS = openapi("tiny")["components"]["schemas"]
ROUTES = {
    "/v1/chat/completions": "ChatRequest",
    "/v1/completions": "CompletionRequest",
    "/tokenize": "TokenizeRequest",
    "/detokenize": "DetokenizeRequest",
}
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [5]},
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=5),
    st.sampled_from(
        ["\ud83d", "user", "assistant", "tool", "required", "auto", "text", "function", "high", "a" * 3000]
    ),
)
_KEYS = st.sampled_from(
    ["role", "content", "type", "text", "function", "name", "arguments", "id", "tool_calls", "0", ""]
)
_VALUES = st.recursive(
    _SCALARS | st.sampled_from([TOOL, [TOOL], [{"role": "user", "content": "a"}]]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=3),
    max_leaves=8,
)


@st.composite
def _bodies(draw: st.DrawFn) -> tuple[str, bytes]:
    route = draw(st.sampled_from(sorted(ROUTES)))
    fields = sorted(SCHEMAS[ROUTES[route]]["properties"])
    changes = draw(st.dictionaries(st.sampled_from(fields), _VALUES, max_size=4))
    body = (GOOD[route] if draw(st.booleans()) else {}) | changes
    text = json.dumps(body)
    if draw(st.integers(0, 9)) == 0:
        at = draw(st.integers(0, len(text)))
        text = text[:at] + draw(st.sampled_from(["", "[", "}", "NaN", "\\ud800", "\x00", '"'])) + text[at + 1 :]
    return route, text.encode()


async def test_no_body_breaks_the_server(scripted: Serve) -> None:
    bodies: list[tuple[str, bytes]] = []

    @given(body=_bodies())
    def collect(body: tuple[str, bytes]) -> None:
        bodies.append(body)

    for _ in range(3):
        collect()
    async with scripted() as server:
        for route, content in bodies:
            try:
                response = await asyncio.wait_for(server.http.post(route, content=content), 10)
            except httpx.HTTPError as error:
                pytest.fail(f"{route} {content!r}: {error!r}")
            assert response.status_code < 500, (route, content, response.text)
            if response.status_code != 200:
                assert set(response.json()["error"]) == {"message", "type", "param", "code"}
            elif response.headers["content-type"].startswith("text/event-stream"):
                assert "event: error" not in response.text, (route, content)
        await server.idle()
        assert (await server.chat(max_tokens=1)).status_code == 200
