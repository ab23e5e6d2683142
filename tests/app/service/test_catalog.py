"""Several models behind one door: each request goes to the one that it names."""

from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager

import httpx
import pytest

from app.admission import Admission, Budget
from app.http.routes import create_app
from app.prompts.chat import ChatSide
from app.prompts.chat_template import chat_templates
from app.replica import EngineReplica
from app.reports.pool import Pool
from app.service.catalog import Catalog
from app.service.service import Service
from app.transport.serve_client import ServeEngineClient
from engine.engine import Engine
from engine.step_loop import StepLoop
from engine.text.tokenizer import Tokenizer
from tests.app.harness import parse_events
from tests.app.http.test_lifecycle import Faults
from tests.app.local_handle import LocalHandle
from tests.app.reports.test_scrape import samples
from tests.scripted import ScriptedRunner

ASLEEP = Pool()
ASLEEP.update([])


async def service(name: str, text: str, tokenizer: Tokenizer, on_exit: ExitStack, *failing_steps: int) -> Service:
    runner = ScriptedRunner(tokenizer.encode(text, add_special_tokens=False), before_step=Faults(*failing_steps))
    replica = EngineReplica(lambda on_output: StepLoop(Engine(runner), on_output))
    on_exit.callback(replica.close)
    client = ServeEngineClient(LocalHandle([replica]))
    chat_side = ChatSide(chat_templates(tokenizer, None), "auto", "auto")
    return Service(name, tokenizer, client, await client.limits(), Admission(Budget(8), 8), chat_side)


@asynccontextmanager
async def served(tokenizer: Tokenizer, broken: str = "") -> AsyncIterator[tuple[httpx.AsyncClient, Catalog]]:
    with ExitStack() as on_exit:
        texts = {"a/small": "hello there", "b": "good morning"}
        catalog = Catalog(
            [await service(n, t, tokenizer, on_exit, *range(1, 9) if n in broken else ()) for n, t in texts.items()]
        )
        transport = httpx.ASGITransport(create_app(catalog, 5.0))
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=30) as http:
            yield http, catalog


async def test_a_request_goes_to_the_model_that_it_names(tokenizer: Tokenizer) -> None:
    async with served(tokenizer) as (http, _):
        for model, text in (("a/small", "hello there"), ("b", "good morning")):
            tokens = len(tokenizer.encode(text, add_special_tokens=False))
            body = {"model": model, "prompt": "x", "max_tokens": tokens}
            whole = (await http.post("/v1/completions", json=body)).json()
            assert (whole["model"], whole["choices"][0]["text"]) == (model, text)
            events = parse_events(await http.post("/v1/completions", json=body | {"stream": True}))
            assert (events.chunks[0]["model"], events.text) == (model, text)
            messages = [{"role": "user", "content": "x"}]
            chat = await http.post("/v1/chat/completions", json=body | {"messages": messages})
            assert chat.json()["choices"][0]["message"]["content"] == text
            assert (await http.post("/tokenize", json={"model": model, "prompt": "x"})).status_code == 200
            assert (await http.get(f"/v1/models/{model}")).json()["id"] == model
        found = samples_of((await http.get("/metrics")).text, "vllm:request_success_total")
        assert found == {"a/small": 3, "b": 3}


def samples_of(text: str, name: str) -> dict[str, float]:
    return {line.split('"')[1]: float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name)}


async def test_all_models_are_listed_and_others_are_refused(tokenizer: Tokenizer) -> None:
    async with served(tokenizer) as (http, _):
        assert [card["id"] for card in (await http.get("/v1/models")).json()["data"]] == ["a/small", "b"]
        for path in ("/v1/completions", "/tokenize"):
            unknown = await http.post(path, json={"model": "c", "prompt": "x"})
            assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
            assert "'a/small', 'b'" in unknown.json()["error"]["message"]
            none = await http.post(path, json={"prompt": "x"})
            assert (none.status_code, none.json()["error"]["param"]) == (400, "model")
        assert (await http.get("/v1/models/c")).status_code == 404
        assert "'a/small', 'b'" in (await http.get("/openapi.json")).json()["info"]["description"]


async def test_one_model_that_fails_leaves_the_other(tokenizer: Tokenizer) -> None:
    async with served(tokenizer, broken="a/small") as (http, _):
        broken, whole = {"model": "a/small", "prompt": "x"}, {"model": "b", "prompt": "x", "max_tokens": 2}
        for _ in range(3):  # as many failed steps in a row end the engine
            assert (await http.post("/v1/completions", json=broken)).status_code == 500
        assert (await http.post("/v1/completions", json=broken)).status_code == 503
        assert (await http.post("/v1/completions", json=whole)).status_code == 200
        assert (await http.get("/health")).status_code == 200
        assert samples((await http.get("/metrics")).text)["nanoserve:engine_replicas"] == 1


async def test_none_that_can_serve_is_unhealthy(tokenizer: Tokenizer) -> None:
    async with served(tokenizer, broken="a/small b") as (http, _):
        for model in ("a/small", "b"):
            for _ in range(3):
                await http.post("/v1/completions", json={"model": model, "prompt": "x"})
        assert (await http.get("/health")).status_code == 503


@pytest.mark.parametrize(("sleeps", "status"), [(True, 200), (False, 503)])
async def test_a_model_that_sleeps_is_not_ill(tokenizer: Tokenizer, sleeps: bool, status: int) -> None:
    client = ServeEngineClient(LocalHandle([]))
    chat_side = ChatSide(chat_templates(tokenizer, None), "auto", "auto")
    with ExitStack() as on_exit:
        limits = await (await service("a", "x", tokenizer, on_exit)).client.limits()
    asleep = Service(
        "a", tokenizer, client, limits, Admission(Budget(8), 8), chat_side, scales_to_zero=sleeps, pool=ASLEEP
    )
    transport = httpx.ASGITransport(create_app(Catalog([asleep]), 5.0))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        assert (await http.get("/health")).status_code == status
