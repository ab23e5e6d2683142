"""What the server says of itself, and the small routes beside generation."""

import json
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import app
from app.openai.openapi import openapi
from app.openai.unsupported import CHAT, COMPLETIONS
from engine.text.tokenizer import Tokenizer
from tests.app.conftest import Serve
from tests.app.harness import Server
from tests.app.http.test_http import error_of

DOCUMENT = openapi(["tiny"])
SCHEMAS = DOCUMENT["components"]["schemas"]


def validate(body: Any, name: str) -> None:
    jsonschema.Draft202012Validator({"$ref": f"#/components/schemas/{name}"} | DOCUMENT).validate(body)


def test_the_version_is_the_packages() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert app.__version__ == project["version"]


def test_every_reference_leads_somewhere() -> None:
    for schema in SCHEMAS.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    text = json.dumps(DOCUMENT)
    names = {part.split('"')[0] for part in text.split('"#/components/schemas/')[1:]}
    assert names <= set(SCHEMAS)
    assert "#/$defs" not in text


def test_what_is_refused_is_not_described_and_what_is_described_is_not_refused() -> None:
    assert not set(CHAT) & set(SCHEMAS["ChatRequest"]["properties"])
    assert not set(COMPLETIONS) & set(SCHEMAS["CompletionRequest"]["properties"])
    assert {"messages", "tools", "n", "logit_bias"} <= set(SCHEMAS["ChatRequest"]["properties"])


async def test_every_route_is_described(scripted: Serve) -> None:
    async with scripted() as server:
        served = (await server.http.get("/openapi.json")).json()
        assert served["paths"] == DOCUMENT["paths"]
        for path, operations in served["paths"].items():
            for method in operations:
                response = await server.http.request(method, path.replace("{name}", "tiny"), json={})
                assert response.status_code in (200, 400), (method, path)


@pytest.mark.parametrize(
    "body",
    [
        {}, {"n": 2, "logprobs": True, "top_logprobs": 2}, {"return_token_ids": True, "prompt_logprobs": 1},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "auto", "stop": ["x"], "seed": 5},
        {"logit_bias": {"5": 1}, "content": [{"type": "text", "text": "a"}], "bad_words": ["no"]},
    ],
)  # fmt: skip
async def test_chats_fit_the_description(scripted: Serve, body: dict[str, Any]) -> None:
    body = {"max_tokens": 3} | body
    content = body.pop("content", "hello")
    validate({"messages": [{"role": "user", "content": content}]} | body, "ChatRequest")
    async with scripted(max_model_len=1024, num_blocks=512) as server:
        response = await server.chat(content, **body)
    assert response.status_code == 200, response.text
    validate(response.json(), "ChatCompletion")


@pytest.mark.parametrize(
    "body",
    [
        {}, {"prompt": ["a", "b"], "n": 2, "logprobs": 1, "echo": True},
        {"prompt": [5, 6], "max_tokens": 0, "echo": True},
        {"prompt": [[5], [6]], "prompt_logprobs": 1, "return_token_ids": True, "best_of": 2, "stop": "x"},
    ],
)  # fmt: skip
async def test_completions_fit_the_description(scripted: Serve, body: dict[str, Any]) -> None:
    body = {"prompt": "hello", "max_tokens": 3} | body
    validate(body, "CompletionRequest")
    async with scripted() as server:
        response = await server.http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        validate(response.json(), "Completion")
        validate((await server.http.post("/v1/completions", json={})).json(), "Error")
        for path, name in (("/v1/models", "ModelList"), ("/v1/models/tiny", "Model"), ("/health", "Health")):
            validate((await server.http.get(path)).json(), name)


async def test_version_and_docs(scripted: Serve) -> None:
    async with scripted() as server:
        version = await server.http.get("/version")
        validate(version.json(), "Version")
        page = await server.http.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "/v1/chat/completions" in page.text
    assert "src=" not in page.text
    assert "http://" not in page.text
    assert "https://" not in page.text


async def both_ways(server: Server, **body: Any) -> tuple[dict[str, Any], str]:
    validate(body, "TokenizeRequest")
    tokens = (await server.http.post("/tokenize", json=body)).json()
    validate(tokens, "Tokens")
    text = (await server.http.post("/detokenize", json={"tokens": tokens["tokens"]})).json()
    validate(text, "Text")
    return tokens, text["prompt"]


async def test_text_becomes_tokens_and_back(scripted: Serve, tokenizer: Tokenizer) -> None:
    async with scripted() as server:
        for text in ("hello é 🌶", "", "<|im_start|>"):
            tokens, back = await both_ways(server, prompt=text, return_token_strs=True)
            assert tokens["tokens"] == tokenizer.encode(text)
            assert (tokens["count"], tokens["max_model_len"], back) == (len(tokens["tokens"]), 128, text)
            assert len(tokens["token_strs"]) == tokens["count"]
        messages = [{"role": "user", "content": "hi"}]
        tokens, back = await both_ways(server, messages=messages)
        assert back == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        chat = (await server.chat("hi", max_tokens=1)).json()
        assert chat["usage"]["prompt_tokens"] == tokens["count"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}), ("/tokenize", {"prompt": 5}), ("/tokenize", {"prompt": "a", "messages": []}),
        ("/tokenize", {"prompt": "a" * 1_000_001}), ("/tokenize", {"messages": [{"role": "user"}]}),
        ("/tokenize", {"messages": [{"role": "user", "content": "a" * 1_000_001}]}), ("/detokenize", {}),
        ("/detokenize", {"tokens": ["a"]}), ("/detokenize", {"tokens": [5] * 1_000_001}),
        ("/detokenize", {"tokens": [-1]}), ("/detokenize", {"tokens": [384]}), ("/detokenize", {"tokens": 5}),
    ],
    ids=range(12),
)  # fmt: skip
async def test_what_is_neither_is_refused(scripted: Serve, path: str, body: dict[str, Any]) -> None:
    async with scripted() as server:
        error_of(await server.http.post(path, json=body), 400)
        error_of(await server.http.post(path, json={"prompt": "a", "tokens": [5], "model": "other"}), 404)
