"""The application on a local Ray cluster with a tiny random model, for checks that need processes to kill."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import ray
from ray import serve

import app
from app.building import take_short_ways
from engine.outputs import EngineStats
from tests import tiny_models
from tests.live_server import free_port, held_of, values_of

APP = "nanoserve"


class Pool:
    """A running application. url: of its HTTP door. model: the folder of its model."""

    def __init__(self, url: str, settings: dict[str, Any]) -> None:
        self.url = url
        self.model = Path(settings["model"])
        self.replicas: int = settings["num_replicas"]
        self._settings = settings

    def deploy(self, **changes: Any) -> None:
        """Start the application, or update it to other settings; returns when it runs with them."""
        serve.run(app.build(self._settings | changes), name=APP, route_prefix="/")

    def metrics(self) -> dict[str, float]:
        return values_of(self._metrics_text())

    def held(self) -> dict[str, float]:
        """What is under way."""
        return held_of(self._metrics_text())

    def _metrics_text(self) -> str:
        return httpx.get(f"{self.url}/metrics", timeout=30).raise_for_status().text

    def engine_pids(self) -> list[int]:
        return _pids("engine")

    def engine_actors(self) -> list[Any]:
        return [ray.get_actor(name, namespace="serve") for name in _actors("engine")]

    def engine_stats(self) -> dict[str, EngineStats]:
        """By the name of the replica's actor."""

        def look(actor: Any) -> EngineStats:
            stats: EngineStats = actor._replica_impl._user_callable_wrapper._callable._replica.stats()
            return stats

        handles = {name: ray.get_actor(name, namespace="serve") for name in _actors("engine")}
        return {name: ray.get(handle.__ray_call__.remote(look)) for name, handle in handles.items()}

    def ingress_pids(self) -> list[int]:
        return _pids("ingress")

    def is_whole(self) -> bool:
        states = serve.status().applications[APP].deployments["engine"].replica_states
        return states == {"RUNNING": self.replicas} and len(self.engine_pids()) == self.replicas

    def wait(self, condition: Callable[[], Any], within_s: float, what: str) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: not within {within_s:.0f} s")
            time.sleep(0.1)


def session_logs() -> Path:
    """The folder of the running cluster's logs."""
    return Path(ray._private.worker._global_node.get_logs_dir_path())


def kill(pid: int, blow: signal.Signals = signal.SIGKILL) -> None:
    os.kill(pid, blow)


def _actors(deployment: str) -> list[str]:
    names = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
    return [name for name in names if f"#{deployment}#" in name]


def _pids(deployment: str) -> list[int]:
    pids = [_pid(name) for name in _actors(deployment)]
    return [pid for pid in pids if pid is not None]


def _pid(actor: str) -> int | None:
    """None for one that is starting, or gone."""
    try:
        handle = ray.get_actor(actor, namespace="serve")
        pid: int = ray.get(handle.__ray_call__.remote(lambda _: os.getpid()), timeout=2)
    except Exception:
        return None
    return pid


@contextmanager
def local_cluster(num_cpus: int, port: int) -> Iterator[None]:
    """A Ray cluster as `serve run` starts it for the application, and Serve at `port` of the loopback with nothing on
    it. All of it ends with the context."""
    take_short_ways()
    ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, log_to_driver=False, namespace="serve")
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        yield
    finally:
        serve.shutdown()
        ray.shutdown()


@contextmanager
def application(port: int, folder: Path, *, replicas: int, ingresses: int = 1, **settings: Any) -> Iterator[Pool]:
    """The application on the cluster that has Serve at `port`, all replicas up; deleted with the context."""
    defaults = {
        "model": str(tiny_models.llama(folder / "tiny", max_position_embeddings=8192)), "served_model_name": "tiny",
        "max_model_len": 2048, "num_gpu_blocks_override": 2048, "dtype": "float32", "num_threads": 1,
        "max_num_seqs": 32, "max_queue_size": 512, "num_replicas": replicas, "num_ingress_replicas": ingresses,
    }  # fmt: skip
    pool = Pool(f"http://127.0.0.1:{port}", defaults | settings)
    try:
        pool.deploy()
        pool.wait(pool.is_whole, 120, "all replicas up")
        yield pool
    finally:
        serve.delete(APP)


@contextmanager
def running(folder: Path, *, replicas: int, ingresses: int = 1, num_cpus: int = 8, **settings: Any) -> Iterator[Pool]:
    """`application` on a cluster of its own."""
    port = free_port()
    with (
        local_cluster(num_cpus, port),
        application(port, folder, replicas=replicas, ingresses=ingresses, **settings) as pool,
    ):
        yield pool
