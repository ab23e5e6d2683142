"""The application over shards: the tokens of one rank alone, and streams that outlive whatever is killed under them."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
import yaml
from ray import serve
from ray.cluster_utils import Cluster

import app
from engine import LLM, SamplingParams
from engine.outputs import EngineStats
from tests import tiny_models
from tests.app.harness import parse_events
from tests.app.sharding.processes import alive, wait
from tests.live_server import free_port, values_of

CONFIG = Path(__file__).parents[3] / "ray_configs" / "tensor_parallel.yaml"
PROMPT = "hello"
NUM_TOKENS = 400
TIMEOUT_S = 2.0


class Application:
    """One replica of two shards, and what undisturbed requests answer."""

    def __init__(self, model: Path) -> None:
        settings: dict[str, Any] = {
            "model": str(model), "max_model_len": 2048, "num_gpu_blocks_override": 300, "num_threads": 1,
            "dtype": "float32", "device": "cpu",
        }  # fmt: skip
        port = free_port()
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        self.settings = settings | {
            "served_model_name": "tiny",
            "shard_timeout_s": TIMEOUT_S,
            "shard_placement": "SPREAD",
        }
        self.deploy(**self.settings)
        self.expected = self.http.post("/v1/completions", json=self.body()).json()["choices"][0]["text"]
        llm = LLM(**settings)
        params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
        self.of_one_rank = llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].text
        llm.close()

    def assert_tokens_are_those_of_one_rank(self) -> None:
        answer = self.http.post("/v1/completions", json=self.body(temperature=0, max_tokens=200)).json()
        assert answer["choices"][0]["text"] == self.of_one_rank

    def deploy(self, **settings: Any) -> None:
        """What the file says, but for these settings."""
        args = yaml.safe_load(CONFIG.read_text())["applications"][0]["args"]
        serve.run(app.build(args | settings), name="nanoserve", route_prefix="/")

    def body(self, **changes: Any) -> dict[str, Any]:
        return {
            "prompt": PROMPT, "temperature": 1.0, "seed": 3, "max_tokens": NUM_TOKENS, "ignore_eos": True
        } | changes  # fmt: skip

    def values(self) -> dict[str, float]:
        return values_of(self.http.get("/metrics").raise_for_status().text)

    def replicas(self) -> list[Any]:
        names = [a["name"] for a in ray.util.list_named_actors(all_namespaces=True) if "#engine#" in a["name"]]
        return [ray.get_actor(name, namespace="serve") for name in names]

    def pids(self) -> tuple[int, list[int]]:
        """Of the only replica, and of its shards by rank."""
        (replica,) = self.replicas()
        found: tuple[int, list[int]] = ray.get(replica.__ray_call__.remote(_pids))
        return found

    def stream_through(self, fault: Callable[[], None]) -> float:
        """A stream in whose midst the fault comes has the text of an undisturbed one; its longest pause in seconds."""
        pauses, lines = [], []
        with self.http.stream("POST", "/v1/completions", json=self.body(stream=True)) as response:
            heard = time.monotonic()
            for line in response.iter_lines():
                lines.append(line)
                if not line.startswith("data:"):  # a comment keeps a stream alive that stands still
                    continue
                pauses.append(time.monotonic() - heard)
                heard = time.monotonic()
                if len(pauses) == 20:
                    fault()
        events = parse_events(httpx.Response(200, headers=response.headers, text="\n".join(lines) + "\n"))
        assert (events.text, events.done, events.names) == (self.expected, True, [])
        return max(pauses[20:])


def _pids(actor: Any) -> tuple[int, list[int]]:
    return os.getpid(), [place.pid for place in _step_loop(actor).engine.runner._group.places]


def _stats(actor: Any) -> EngineStats:
    stats: EngineStats = _step_loop(actor).stats()
    return stats


def _step_loop(actor: Any) -> Any:
    return actor._replica_impl._user_callable_wrapper._callable._replica._step_loop


@pytest.fixture(scope="module")
def application(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Application]:
    model = tiny_models.llama(tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=2048)
    application = Application(model)
    yield application
    application.http.close()
    serve.shutdown()


def groups() -> list[dict[str, Any]]:
    """Placement groups that are there."""
    return [group for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"]


def nodes() -> list[set[str]]:
    """On which the bundles of each placement group are."""
    return [set(group["bundles_to_node_id"].values()) for group in groups()]


def test_tokens_are_those_of_one_rank(application: Application) -> None:
    http = application.http
    assert http.get("/health").status_code == 200
    assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["tiny"]
    application.assert_tokens_are_those_of_one_rank()
    values = application.values()
    assert values["vllm:generation_tokens_total"] == NUM_TOKENS + 200
    assert values["nanoserve:engine_replicas"] == 1
    assert values["nanoserve:live_blocks"] == 0
    assert len(groups()) == 1


def assert_a_stream_outlives(application: Application, victim: int, blow: signal.Signals) -> None:
    """And what was left of the old replica is gone by the time it goes on. victim: a process of it."""
    replica, shards = application.pids()
    memory = set(os.listdir("/dev/shm"))
    ended: list[threading.Thread] = []

    def strike() -> None:
        os.kill(victim, blow)
        began = time.monotonic()

        def watch() -> None:
            wait(lambda: not any(map(alive, (replica, *shards))))
            print(f"{blow.name}: seen and all ended after {time.monotonic() - began:.2f} s")

        ended.append(threading.Thread(target=watch))
        ended[0].start()

    print(f"{blow.name}: stream paused for {application.stream_through(strike):.2f} s")
    ended[0].join()
    assert not any(map(alive, (replica, *shards)))
    wait(lambda: len(groups()) == 1)
    assert application.http.get("/health").status_code == 200
    assert application.values()["nanoserve:failovers_given_up_total"] == 0
    assert not [name for name in set(os.listdir("/dev/shm")) - memory if "nanoserve" in name]


def test_a_stream_outlives_a_shard_that_is_killed(application: Application) -> None:
    assert_a_stream_outlives(application, application.pids()[1][0], signal.SIGKILL)


def test_a_stream_outlives_a_shard_that_stops(application: Application) -> None:
    assert_a_stream_outlives(application, application.pids()[1][1], signal.SIGSTOP)


def test_streams_outlive_their_replica_and_a_node(application: Application, cluster: Cluster, second_node: Any) -> None:
    """The replica is killed, the next one finds place on both nodes, and then one of them goes."""
    assert_a_stream_outlives(application, application.pids()[0], signal.SIGKILL)
    assert [len(places) for places in nodes()] == [2]
    application.assert_tokens_are_those_of_one_rank()
    _, shards = application.pids()
    pause = application.stream_through(lambda: cluster.remove_node(second_node, allow_graceful=False))
    print(f"node lost: stream paused for {pause:.2f} s")
    wait(lambda: not any(map(alive, shards)))
    wait(lambda: nodes() == [{cluster.head_node.node_id}], within_s=30.0)  # Ray sees the loss later than the shards


def test_a_stream_goes_on_at_a_replica_that_stands_by(application: Application) -> None:
    """And does not wait for the successor of the one that lost a shard."""
    application.deploy(**application.settings, num_replicas=2)
    wait(lambda: application.values()["nanoserve:engine_replicas"] == 2, within_s=30.0)
    pids = {replica: ray.get(replica.__ray_call__.remote(_pids)) for replica in application.replicas()}
    struck: list[Any] = []

    def strike() -> None:
        struck.extend(replica for replica in pids if ray.get(replica.__ray_call__.remote(_stats)).num_running)
        os.kill(pids[struck[0]][1][1], signal.SIGKILL)

    print(f"another stood by: stream paused for {application.stream_through(strike):.2f} s")
    (other,) = pids.keys() - struck
    assert ray.get(other.__ray_call__.remote(_stats)).generation_tokens > NUM_TOKENS / 2, "it went on somewhere else"


def test_the_default_model_in_three_parts_knows_the_capital_of_france(application: Application) -> None:
    """Nine heads and three KV heads."""
    application.deploy(model="smollm2-135m", device="cpu", tensor_parallel_size=3, max_model_len=512)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 20}
    answer = application.http.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"] == "The capital of France is Paris."
    assert len(application.pids()[1]) == 3
