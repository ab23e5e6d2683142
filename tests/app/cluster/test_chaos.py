"""Three replicas behind two ingresses: what is killed, replaced and left in a hurry."""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray

from benchmarks.chaos import Report, Traffic, torment
from benchmarks.pools.local import Pool, application, kill
from tests.app.cluster.conftest import PORT, ask_and, went_on


@pytest.fixture(scope="module")
def pool(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    settings = {"max_model_len": 8192, "max_num_seqs": 20, "graceful_shutdown_timeout_s": 1.0}
    with application(PORT, tmp_path_factory.mktemp("chaos"), replicas=3, ingresses=2, **settings) as pool:
        yield pool


def test_metrics_are_of_the_whole_application_whichever_ingress_is_asked(pool: Pool) -> None:
    for i in range(12):
        with httpx.Client(base_url=pool.url, timeout=30) as client:  # connections of their own, for both ingresses
            body = {"prompt": [5 + i], "max_tokens": 3, "ignore_eos": True}
            assert client.post("/v1/completions", json=body).status_code == 200

    def totals() -> set[tuple[float, ...]]:
        names = ("vllm:request_success_total", "vllm:generation_tokens_total", "nanoserve:ingress_replicas")
        seen = [pool.metrics() for _ in range(6)]
        return {(*(values[name] for name in names), values["nanoserve:engine_replicas"]) for values in seen}

    pool.wait(lambda: totals() == {(12, 36, 2, 3)}, 5, "both ingresses say the same")


def test_clients_that_leave_within_a_tenth_of_a_second_orphan_nothing(pool: Pool) -> None:
    """While they are queued, while their prompt is read, in mid-stream, with a stream and without."""
    rng = random.Random(0)

    async def come_and_leave(http: httpx.AsyncClient) -> None:
        body: dict[str, Any] = {
            "prompt": [rng.randrange(3, 384) for _ in range(rng.choice((3, 1500)))], "max_tokens": 4000,
            "ignore_eos": True, "stream": rng.random() < 0.5, "n": rng.choice((1, 1, 3)), "temperature": 1.0,
        }  # fmt: skip
        asked = asyncio.ensure_future(http.post("/v1/completions", json=body))
        await asyncio.sleep(rng.uniform(0, 0.1))
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)

    async def many() -> None:
        async with httpx.AsyncClient(base_url=pool.url, timeout=60, limits=httpx.Limits(max_connections=200)) as http:
            for _ in range(3):
                await asyncio.gather(*(come_and_leave(http) for _ in range(60)))

    asyncio.run(many())
    pool.wait(lambda: not pool.held(), 8, "nothing held")
    assert httpx.post(f"{pool.url}/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200


def test_a_session_stays_at_one_replica_through_both_ingresses(pool: Pool) -> None:
    def prompt_tokens() -> dict[str, int]:
        return {name: engine.prompt_tokens for name, engine in pool.engine_stats().items()}

    def ask(session: str, prompt: int) -> None:  # on connections of their own, for both ingresses
        body = {"prompt": [prompt] * 50, "max_tokens": 2, "ignore_eos": True}
        headers = {"x-session-id": session}
        assert httpx.post(f"{pool.url}/v1/completions", json=body, headers=headers, timeout=30).status_code == 200

    before = prompt_tokens()
    for prompt in range(10, 22):
        ask("chat", prompt)
    assert sorted(after - before[name] for name, after in prompt_tokens().items()) == [0, 0, 12 * 50]
    for prompt in range(10, 22):
        ask(f"chat {prompt}", prompt)
    assert sum(after > before[name] for name, after in prompt_tokens().items()) > 1, "and not all sessions at one"


def test_a_step_that_fails_is_told_to_its_requests_and_leaves_those_of_other_replicas(
    pool: Pool, tmp_path: Path
) -> None:
    only_one = tmp_path / "failed"

    def fail_a_step(actor: Any) -> None:
        engine = actor._replica_impl._user_callable_wrapper._callable._replica._step_loop.engine
        launch = engine.runner.launch
        steps = 0

        def failing(plan: Any) -> Any:
            nonlocal steps
            steps += 1
            if steps < 700:  # all have begun, and none has its 1,500 tokens
                return launch(plan)
            engine.runner.launch = launch
            try:
                only_one.touch(exist_ok=False)
            except FileExistsError:  # another replica came here first
                return launch(plan)
            raise RuntimeError("a secret of the engine")

        engine.runner.launch = failing

    ray.get([actor.__ray_call__.remote(fail_a_step) for actor in pool.engine_actors()])
    events = ask_and(pool, lambda: None, *[1500] * 12)
    failed = [each for each in events if not each.done]
    assert 1 <= len(failed) < 12
    for each in failed:
        assert (each.names, each.chunks[-1]["error"]["code"]) == (["error"], "engine_error")
        assert "secret" not in each.chunks[-1]["error"]["message"]
    assert all(each.finish_reasons == ["length"] for each in events if each.done)
    pool.wait(lambda: not pool.held(), 8, "nothing held")
    assert pool.is_whole(), "a step that fails ends no replica"


def test_an_ingress_that_is_killed_leaves_nothing_running(pool: Pool) -> None:
    async def ask() -> list[Any]:
        body = {"prompt": "a", "max_tokens": 8000, "ignore_eos": True}
        async with httpx.AsyncClient(base_url=pool.url, timeout=60) as http:
            asked = [asyncio.ensure_future(http.post("/v1/completions", json=body)) for _ in range(8)]
            await asyncio.sleep(1.0)
            for pid in await asyncio.to_thread(pool.ingress_pids):
                kill(pid)
            return await asyncio.gather(*asked, return_exceptions=True)

    answers = asyncio.run(ask())
    assert all(isinstance(answer, Exception) or answer.status_code >= 500 for answer in answers)

    def answers_again() -> bool:
        try:
            return not pool.held() and pool.metrics()["nanoserve:ingress_replicas"] == 2
        except httpx.HTTPError:
            return False

    pool.wait(answers_again, 40, "ingresses back, and nothing held")


def test_streams_outlive_their_replicas(pool: Pool) -> None:
    """One replica is killed, and then all at once."""
    report = asyncio.run(torment(pool, kills=2, streams=60, max_tokens=150, say=print, requests=8))
    assert report.wrong == []
    assert report.kills == 4
    assert report.streams >= 60
    assert report.failovers > 0


def test_an_update_that_exceeds_its_drain_fails_no_request(pool: Pool) -> None:
    """All replicas of both kinds are replaced, under streams that take longer than an engine has to drain."""
    bodies = [
        {"prompt": [5 + i], "max_tokens": 1500 + 250 * i, "ignore_eos": True, "stream": True, "return_token_ids": True,
         "temperature": 1.0, "seed": i}
        for i in range(4)
    ]  # fmt: skip
    bodies.append(bodies[0] | {"max_tokens": 600, "structured_outputs": {"regex": "([a-f]{3}-){700}"}})
    report = Report()

    async def update() -> None:
        async with Traffic(pool, bodies, 12, report):
            await asyncio.to_thread(pool.deploy, max_num_seqs=5)

    before = went_on()
    asyncio.run(update())
    assert report.wrong == []
    assert report.streams >= 12
    assert went_on() > before, "no stream outlived its replica: nothing was tried"
    pool.wait(lambda: not pool.held(), 10, "nothing held")
