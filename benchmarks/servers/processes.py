"""This project's application and its peers' servers as processes on this machine."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.peer import setup as peer_setup
from benchmarks.peer.engines import nanoserve_settings, worker_environment
from benchmarks.servers.client import wait_until_served
from engine.hub import resolve_model
from tests.live_server import server_process

HAPROXY = {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"}
"""Serve as `ray_configs/production.yaml` would have it started."""

PORTS = {"nanoserve": 8000, "nanoserve-haproxy": 8000, "vllm": 8001, "llamacpp": 8002}
KNOWN_SERVERS = tuple(PORTS)
MAX_MODEL_LEN = 2048
MAX_STREAMS = 64
START_S = 400


def command(name: str, precision: str, model: str, threads: int) -> list[str]:
    """The command line of a server; `environment` has the rest."""
    port = str(PORTS[name])
    if is_own(name):
        settings = nanoserve_settings(precision) | {"model": resolve_model(model), "max_model_len": MAX_MODEL_LEN}
        serve = str(Path(sys.executable).with_name("serve"))
        return [serve, "run", "app:build", *(f"{key}={value}" for key, value in settings.items())]
    if name == "vllm":
        vllm = [str(peer_setup.environment("vllm")), "-m", "vllm.entrypoints.openai.api_server"]
        options = ["--dtype", "float32", "--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(MAX_STREAMS)]
        return [*vllm, "--model", str(peer_setup.hf_model(model)), "--host", "127.0.0.1", "--port", port, *options]
    program = str(peer_setup.llamacpp() / "bin" / "llama-server")
    options = ["-np", str(MAX_STREAMS), "-c", str(MAX_STREAMS * 512), "-t", str(threads), "-tb", str(threads)]
    options += ["--host", "127.0.0.1", "--port", port, "--no-webui"]
    return [program, "-m", str(peer_setup.llamacpp_model(model, precision)), *options]


def is_own(name: str) -> bool:
    """Whether it is this project's application, behind whichever proxy."""
    return name.startswith("nanoserve")


def environment(name: str) -> dict[str, str]:
    own = {"RAY_USAGE_STATS_ENABLED": "0"} | (HAPROXY if name == "nanoserve-haproxy" else {})
    return worker_environment("nanoserve") | own if is_own(name) else worker_environment(name)


@contextmanager
def serving(name: str, words: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Run a server by its command line; gives its port and its model's name, and ends it afterwards."""
    with server_process(words, environment(name)) as server:
        try:
            model = wait_until_served(PORTS[name], START_S, server.check)
        except TimeoutError as error:
            raise TimeoutError(f"{name}: {error}. It said:\n{server.said()}") from None
        yield PORTS[name], model
