"""Whose request it is, how urgent and of which session: from the door to the engine."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from app.engine_client import Submission
from app.http.doors import MAX_SESSION_LENGTH, Doors
from app.http.routes import create_app
from app.ingress import admission
from app.prompts.chat import ChatSide
from app.prompts.chat_template import chat_templates
from app.replica import EngineReplica
from app.service.catalog import Catalog
from app.service.service import Service
from app.settings import load_settings
from app.transport.serve_client import ServeEngineClient
from engine.engine import Engine
from engine.step_loop import StepLoop
from engine.text.tokenizer import Tokenizer
from tests.app.conftest import Serve
from tests.app.harness import Server, until
from tests.app.http.test_lifecycle import Gate
from tests.app.local_handle import LocalHandle
from tests.scripted import ScriptedRunner

KEYS = ("key-of-alice", "key-of-bob")


def recorded(server: Server) -> list[Submission]:
    submissions: list[Submission] = []
    submit = server.replica.submit

    def record(submission: Submission, *more: Any) -> Any:
        submissions.append(submission)
        return submit(submission, *more)

    server.replica.submit = record
    return submissions


async def post(server: Server, key: str = "", session: str = "", **body: Any) -> int:
    headers = {"x-session-id": session} if session else {}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    body = {"prompt": "a", "max_tokens": 2, "ignore_eos": True} | body
    return (await server.http.post("/v1/completions", json=body, headers=headers)).status_code


async def test_tenant_session_and_class_reach_the_engine_and_the_key_does_not(scripted: Serve) -> None:
    async with scripted(doors=Doors(KEYS)) as server:
        seen = recorded(server)
        for stream in (False, True):
            assert await post(server, KEYS[0], "chat 1", stream=stream) == 200
        assert await post(server, KEYS[1], "s" * 1000, service_tier="flex", priority=3) == 200
        assert await post(server, KEYS[0], service_tier="priority") == 200
        assert await post(server, KEYS[0], service_tier="gold") == 400
    alice, streamed, bob, urgent = seen
    assert (alice.tenant, alice.session, alice.is_batch, alice.priority) == (streamed.tenant, "chat 1", False, 0)
    assert alice.tenant == urgent.tenant != bob.tenant
    assert (bob.is_batch, bob.priority, len(bob.session or "")) == (True, 3, MAX_SESSION_LENGTH)
    assert (urgent.session, urgent.priority) == (None, -1)
    assert not any(key in repr(submission) for key in KEYS for submission in seen)


async def test_without_keys_all_are_one_tenant(scripted: Serve) -> None:
    async with scripted() as server:
        seen = recorded(server)
        assert await post(server) == 200
    assert (seen[0].tenant, seen[0].session) == ("", None)


async def test_a_flood_of_one_key_holds_up_no_other(scripted: Serve) -> None:
    async with scripted(before_step=Gate(0.002), max_num_seqs=1, capacity=2, doors=Doors(KEYS)) as server:
        ended: list[str] = []

        async def ask(key: str, name: str) -> None:
            assert await post(server, key, max_tokens=10) == 200
            ended.append(name)

        flood = [asyncio.ensure_future(ask(KEYS[0], "flood")) for _ in range(30)]
        await until(lambda: server.admission.waiting > 20, 5)
        await ask(KEYS[1], "other")
        await asyncio.gather(*flood)
        assert ended.index("other") < 10


@asynccontextmanager
async def ingress(replica: EngineReplica, tokenizer: Tokenizer) -> AsyncIterator[httpx.AsyncClient]:
    """One of several before an engine replica, with the budgets that the settings give it."""
    client = ServeEngineClient(LocalHandle([replica]))
    limits = await client.limits()
    chat_side = ChatSide(chat_templates(tokenizer, None), "auto", "auto")
    service = Service("tiny", tokenizer, client, limits, admission(load_settings({}, {}), limits), chat_side)
    transport = httpx.ASGITransport(create_app(Catalog([service]), 5.0, Doors(KEYS)))
    async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=30) as http:
        yield http


async def test_long_streams_of_one_key_give_places_up_to_another_at_whichever_ingress(tokenizer: Tokenizer) -> None:
    gate = Gate(0.002)
    engine = Engine(ScriptedRunner([5, 6, 7], before_step=gate, max_num_seqs=4, max_model_len=1024, num_blocks=600))
    replica = EngineReplica(lambda on_output: StepLoop(engine, on_output))
    ended: list[str] = []

    async def ask(http: httpx.AsyncClient, key: str, max_tokens: int) -> None:
        body = {"prompt": "a", "max_tokens": max_tokens, "ignore_eos": True, "return_token_ids": True}
        answer = await http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
        ended.append(key)
        assert len(answer.json()["choices"][0]["token_ids"]) == max_tokens

    try:
        async with ingress(replica, tokenizer) as one, ingress(replica, tokenizer) as other:
            flood = [asyncio.ensure_future(ask(http, KEYS[0], 400)) for http in (one, other) for _ in range(8)]
            await until(lambda: replica.stats().num_running == 4 and replica.stats().num_waiting >= 4, 5)
            for http in (one, other):
                await ask(http, KEYS[1], 20)
            assert ended == [KEYS[1]] * 2, "all that the flood runs is long, and none of it had to end for the others"
            await asyncio.gather(*flood)
            assert replica.stats().preemptions >= 1
    finally:
        replica.close()


async def test_a_full_queue_makes_room_for_a_key_that_has_less_of_it(scripted: Serve) -> None:
    gate = Gate()
    gate.open.clear()
    async with scripted(before_step=gate, max_num_seqs=1, capacity=1, max_waiting=3, doors=Doors(KEYS)) as server:
        flood = [asyncio.ensure_future(post(server, KEYS[0])) for _ in range(4)]
        await until(lambda: server.admission.waiting == 3, 5)
        assert await post(server, KEYS[0]) == 429
        other = asyncio.ensure_future(post(server, KEYS[1]))
        await until(lambda: sum(task.done() for task in flood) == 1, 5)
        gate.open.set()
        assert sorted(await asyncio.gather(*flood)) == [200, 200, 200, 429]
        assert await other == 200
