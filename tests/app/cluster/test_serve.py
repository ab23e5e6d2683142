"""The application on a local Ray cluster, with the tiny model."""

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from openai import APIStatusError, OpenAI
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

import app
from tests.app.cluster.conftest import URL
from tests.app.harness import parse_events
from tests.live_server import held_of, values_of

LONG = {"prompt": "hello", "max_tokens": 3000, "ignore_eos": True}


def run(model_dir: Path, **settings: Any) -> None:
    defaults = {
        "model": str(model_dir), "max_model_len": 4096, "num_gpu_blocks_override": 600, "num_threads": 1,
        "dtype": "float32", "max_num_seqs": 4, "max_queue_size": 2, "served_model_name": "tiny",
    }  # fmt: skip
    serve.run(app.build(defaults | settings), name="nanoserve", route_prefix="/")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests import tiny_models

    return tiny_models.llama(tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=8192)


@pytest.fixture
def http(cluster: None, model: Path) -> Iterator[httpx.Client]:
    """A client of the application, which is started by the first test and found idle by each."""
    if "nanoserve" not in serve.status().applications:
        run(model)
    with httpx.Client(base_url=URL, timeout=60) as client:
        wait(lambda: is_idle(client))
        yield client


def gauges(client: httpx.Client) -> dict[str, float]:
    response = client.get("/metrics")
    assert response.status_code == 200, response.text
    return values_of(response.text)


def is_idle(client: httpx.Client) -> bool:
    return not held_of(client.get("/metrics").raise_for_status().text)


def wait(condition: Callable[[], bool], within_s: float = 10.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s} s"
        time.sleep(0.02)


def test_openais_own_client_is_content(http: httpx.Client) -> None:
    client = OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    assert [card.id for card in client.models.list()] == ["tiny"]
    messages: Any = [{"role": "user", "content": "hello"}]
    options: Any = {"model": "tiny", "messages": messages, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**options)
    assert whole.usage is not None
    assert (whole.usage.completion_tokens, whole.choices[0].finish_reason) == (12, "length")
    chunks = list(client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **options))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == (
        whole.choices[0].message.content
    )
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12
    with pytest.raises(APIStatusError) as caught:
        client.chat.completions.create(model="other", messages=messages)
    assert (caught.value.status_code, caught.value.code) == (404, "model_not_found")


def test_refusals_come_before_the_status(http: httpx.Client) -> None:
    for stream in (False, True):
        long = http.post("/v1/completions", json={"prompt": [5] * 4096, "stream": stream})
        assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")
        late = http.post("/v1/completions", json={"prompt": "a", "stop_token_ids": [9999], "stream": stream})
        assert (late.status_code, late.json()["error"]["param"]) == (400, "stop_token_ids")
    assert http.get("/v1/none").json()["error"]["code"] == "not_found"
    assert http.delete("/v1/completions").json()["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("running", [False, True])
def test_a_client_that_leaves_frees_its_blocks_within_a_second(http: httpx.Client, stream: bool, running: bool) -> None:
    async def come_and_leave() -> None:
        async with httpx.AsyncClient(base_url=URL, timeout=60) as client:
            posts = [client.post("/v1/completions", json=LONG | {"stream": stream}) for _ in range(5)]
            tasks = [asyncio.ensure_future(post) for post in posts]
            await asyncio.sleep(0.01)  # too early for the engine to have begun
            if running:
                await asyncio.to_thread(wait, lambda: not is_idle(http))
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(come_and_leave())
    wait(lambda: is_idle(http), within_s=2.0)


def test_overload_is_429_and_all_that_was_taken_is_served(http: httpx.Client) -> None:
    async def flood() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=40)
        async with httpx.AsyncClient(base_url=URL, timeout=60, limits=limits) as client:
            body = LONG | {"max_tokens": 150}
            posts = (client.post("/v1/completions", json=body | {"stream": bool(i % 2)}) for i in range(30))
            return await asyncio.gather(*posts)

    responses = asyncio.run(flood())
    refused = [response for response in responses if response.status_code != 200]
    assert {response.status_code for response in refused} == {429}
    assert len(responses) - len(refused) >= 7  # 5 in the engine, 2 in the queue
    for response in refused:
        assert response.json()["error"]["type"] == "rate_limit_error"
        assert int(response.headers["retry-after"]) >= 1
    wait(lambda: is_idle(http))


def test_an_id_that_comes_twice_at_once_disturbs_nobody(http: httpx.Client) -> None:
    """A client chooses `x-request-id`; ours are our own."""
    names = ["same", "same", "same~1", "a" * 5000, "\u00e9", "%0d%0aset-cookie: a=b"]

    def ask(name: str) -> httpx.Response:
        headers = {"x-request-id": name.encode(), "x-session-id": name.encode()}
        return httpx.post(f"{URL}/v1/completions", json=LONG | {"max_tokens": 100}, headers=headers, timeout=60)

    with ThreadPoolExecutor(len(names)) as pool:
        answers = list(pool.map(ask, names))
    assert [answer.json()["usage"]["completion_tokens"] for answer in answers] == [100] * len(names)
    assert len({answer.json()["id"] for answer in answers}) == len(names)
    assert not any("set-cookie" in answer.headers for answer in answers)


def test_a_replica_that_is_killed_is_a_pause_in_its_streams(http: httpx.Client) -> None:
    assert_goes_on(http, lambda replica: ray.kill(replica, no_restart=True))


def test_an_engine_whose_step_thread_dies_is_replaced_and_its_streams_go_on(http: httpx.Client) -> None:
    def break_engine(actor: Any) -> None:
        deployment = actor._replica_impl._user_callable_wrapper._callable
        engine = deployment._replica._step_loop.engine
        engine.step = lambda: 1 / 0

    assert_goes_on(http, lambda replica: ray.get(replica.__ray_call__.remote(break_engine)))


def test_an_engine_that_stands_still_is_replaced_and_its_streams_go_on(http: httpx.Client) -> None:
    def stop_steps(actor: Any) -> None:
        import app.replica

        app.replica.MAX_STALL_S = 0.5
        deployment = actor._replica_impl._user_callable_wrapper._callable
        deployment._replica._step_loop.engine.step = lambda: time.sleep(3600)

    assert_goes_on(http, lambda replica: ray.get(replica.__ray_call__.remote(stop_steps)))


def assert_goes_on(http: httpx.Client, end: Callable[[Any], None]) -> None:
    """A stream, and an answer that is waited for, are those of an undisturbed run, though the only replica ended."""
    body = LONG | {"seed": 5, "max_tokens": 1500}
    expected = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    replica, before = engine_actor(), gauges(http)["nanoserve:failovers_total"]
    with ThreadPoolExecutor() as pool, httpx.Client(base_url=URL, timeout=60) as other:
        other.get("/health")  # connected, so that its request is there before the replica ends
        whole = pool.submit(other.post, "/v1/completions", json=body)
        with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
            parts = response.iter_bytes()
            first = next(parts)
            end(replica)
            data = first + b"".join(parts)
        events = parse_events(httpx.Response(200, headers=response.headers, content=data))
        assert whole.result().json()["choices"][0]["text"] == expected
    assert (events.text, events.done, events.names) == (expected, True, [])
    now = gauges(http)
    assert now["nanoserve:failovers_total"] - before >= 2
    assert now["nanoserve:failovers_given_up_total"] == 0
    assert 0 < now["nanoserve:failover_longest_pause_seconds"] < 30
    wait_for_the_next(replica, http)


def wait_for_the_next(replica: Any, client: httpx.Client) -> None:
    wait(lambda: engine_actor() not in (None, replica) and client.get("/health").status_code == 200, within_s=40)
    assert client.post("/v1/completions", json={"prompt": "again", "max_tokens": 2}).status_code == 200


def engine_actor() -> Any:
    names = actors("engine")
    return ray.get_actor(names[-1], namespace="serve") if names else None


def test_an_adapter_that_one_ingress_loads_is_served_by_all_and_by_one_that_starts_later(
    cluster: None, model: Path, tmp_path: Path
) -> None:
    from tests.tiny_adapters import write_adapter

    adapter = write_adapter(tmp_path / "adapter", model)
    run(model, num_ingress_replicas=2, allow_runtime_lora_updating=True)
    load = {"lora_name": "mine", "lora_path": str(adapter)}
    assert httpx.post(f"{URL}/v1/load_lora_adapter", json=load, timeout=60).status_code == 200
    body = {"prompt": "hello", "max_tokens": 8, "temperature": 0}

    def answers(name: str) -> set[str]:
        """Of many connections, which Serve spreads over the ingress replicas; what one alone knew would be a 404."""
        posts = [httpx.post(f"{URL}/v1/completions", json=body | {"model": name}, timeout=60) for _ in range(12)]
        return {post.raise_for_status().json()["choices"][0]["text"] for post in posts}

    (adapted,), (plain,) = answers("mine"), answers("tiny")
    assert adapted != plain
    before = set(actors("ingress"))
    ray.kill(ray.get_actor(min(before), namespace="serve"), no_restart=True)
    wait(lambda: len(set(actors("ingress")) - before) == 1, within_s=40)
    wait(lambda: httpx.get(f"{URL}/metrics").text.count('nanoserve:ingress_replicas{model_name="tiny"} 2') == 1, 40)
    assert answers("mine") == {adapted}
    gone = httpx.post(f"{URL}/v1/unload_lora_adapter", json={"lora_name": "mine"})
    assert gone.status_code == 200
    statuses = {httpx.post(f"{URL}/v1/completions", json=body | {"model": "mine"}).status_code for _ in range(12)}
    assert statuses == {404}


def test_settings_change_under_the_ingress_as_it_runs(cluster: None, model: Path, tmp_path: Path) -> None:
    """By a file that is deployed again, as `serve deploy` does it: one stream outlives three changes of mind."""
    keys = tmp_path / "keys"
    keys.write_text("sk-one\n")
    args = {"model": str(model), "num_threads": 1, "num_gpu_blocks_override": 600, "api_keys_file": str(keys)}

    def deploy(user_config: dict[str, Any] | None) -> None:
        ingress = {"name": "ingress"} | ({} if user_config is None else {"user_config": user_config})
        application = {
            "name": "nanoserve", "route_prefix": "/", "import_path": "app:build", "args": args, "deployments": [ingress]
        }  # fmt: skip
        _get_global_client().deploy_apps(ServeDeploySchema(applications=[application]), _blocking=True)

    def status(key: str) -> int:
        return httpx.get(f"{URL}/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code

    serve.delete("nanoserve")
    deploy(None)
    wait(lambda: status("sk-one") == 200, within_s=60)
    before, body = actors("ingress"), LONG | {"stream": True}
    with httpx.stream(
        "POST", f"{URL}/v1/completions", json=body, headers={"Authorization": "Bearer sk-one"}, timeout=60
    ) as stream:
        parts = stream.iter_bytes()
        first = next(parts)
        keys.write_text("sk-two\n")
        deploy({"max_requests_per_key": 5})
        wait(lambda: (status("sk-one"), status("sk-two")) == (401, 200))
        deploy({"max_queue_size": "many"})
        deploy({"max_num_seqs": 3})
        assert status("sk-two") == 200
        assert actors("ingress") == before
        assert (first + b"".join(parts)).endswith(b"data: [DONE]\n\n")
    serve.delete("nanoserve")


def actors(deployment: str) -> list[str]:
    names = (a["name"] for a in ray.util.list_named_actors(all_namespaces=True))
    return [name for name in names if f"#{deployment}#" in name]


def test_the_environment_reaches_the_application(
    http: httpx.Client, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANOSERVE_SERVED_MODEL_NAME", "from-the-environment")
    monkeypatch.setenv("NANOSERVE_MODEL", str(model))
    monkeypatch.setenv("NANOSERVE_NUM_GPU_BLOCKS_OVERRIDE", "64")
    monkeypatch.setenv("NANOSERVE_API_KEYS", "sk-other, sk-test")
    serve.run(app.deployment, name="nanoserve", route_prefix="/")
    wait(lambda: httpx.get(f"{URL}/v1/models").status_code == 401, within_s=30)
    http.headers["Authorization"] = "Bearer sk-test"
    wait(lambda: http.get("/v1/models").json()["data"][0]["id"] == "from-the-environment", within_s=30)
    assert parse_events(http.post("/v1/completions", json={"prompt": "a", "stream": True})).done
    assert os.environ["NANOSERVE_NUM_GPU_BLOCKS_OVERRIDE"] == "64"
    serve.delete("nanoserve")
