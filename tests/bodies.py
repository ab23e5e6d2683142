"""Generated requests to every route: mostly bad, some good, all of them short work."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from app.openai.openapi import openapi

DOCUMENT = openapi(["any"])
SCHEMAS = DOCUMENT["components"]["schemas"]
MODELS = {
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


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str
    body: bytes


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
    ["role", "content", "type", "text", "function", "name", "arguments", "id", "tool_calls", "0", "", "json", "schema"]
)
_VALUES = st.recursive(
    _SCALARS | st.sampled_from([TOOL, [TOOL], [{"role": "user", "content": "a"}], {"type": "json_object"}]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=3),
    max_leaves=8,
)
_NOISE = st.sampled_from([b"", b"[", b"}", b"NaN", b"\\ud800", b"\x00", b'"', b"\xff", b"1e999", b"{" * 300])


@st.composite
def _posts(draw: st.DrawFn) -> Request:
    route = draw(st.sampled_from(sorted(MODELS)))
    fields = sorted(set(SCHEMAS[MODELS[route]]["properties"]) - {"max_tokens", "max_completion_tokens"})
    changes = draw(st.dictionaries(st.sampled_from(fields), _VALUES, max_size=4))
    if draw(st.integers(0, 9)) == 0:
        changes["max_tokens"] = draw(st.one_of(st.integers(-5, 3), _VALUES))
    body = (GOOD[route] if draw(st.booleans()) else {}) | changes
    text = json.dumps(body).encode()
    if draw(st.integers(0, 9)) == 0:
        at = draw(st.integers(0, len(text)))
        text = text[:at] + draw(_NOISE) + text[at + 1 :]
    return Request("POST", route, text)


_ANYWHERE = st.builds(
    Request,
    st.sampled_from(["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"]),
    st.sampled_from([*DOCUMENT["paths"], "/v1/models/any", "/v1/models/%F0%9F", "/v1/models/a/b", "/v1", "/%2e%2e/x"]),
    st.sampled_from([b"", b"{}", b"[]", b"null", b"\xff\xfe"]) | st.binary(max_size=20),
)

REQUESTS = st.one_of(*[_posts()] * 9, _ANYWHERE)


def generated(count: int, first_seed: int = 0) -> Iterator[Request]:
    """`count` requests, the same each time. Hypothesis runs a batch for each seed."""
    batch = 500
    made: list[Request] = []

    @settings(max_examples=batch, database=None, deadline=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(REQUESTS)
    def collect(request: Request) -> None:
        made.append(request)

    left, number = count, first_seed
    while left:
        made.clear()
        seed(number)(collect)()
        number += 1
        random.Random(number).shuffle(made)  # small ones come first otherwise
        yield from made[:left]
        left -= min(left, len(made))
