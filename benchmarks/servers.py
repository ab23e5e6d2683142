"""This project's application and its peers' servers as processes on this machine."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks import peer_setup
from benchmarks.http_client import wait_until_served
from benchmarks.peer_engines import nanoserve_settings, worker_environment
from engine.hub import resolve_model

PORTS = {"nanoserve": 8000, "vllm": 8001, "llamacpp": 8002}
KNOWN_SERVERS = tuple(PORTS)
MAX_MODEL_LEN = 2048
MAX_STREAMS = 64
START_S = 400


def command(name: str, precision: str, model: str, threads: int) -> list[str]:
    """The command line of a server."""
    port = str(PORTS[name])
    if name == "nanoserve":
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


@contextmanager
def serving(name: str, words: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Run a server by its command line; gives its port and its model's name, and ends it afterwards."""
    root = Path(__file__).parents[1]
    environment = worker_environment(name) | {"RAY_USAGE_STATS_ENABLED": "0"}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            words, stdout=log, stderr=log, cwd=root, env=environment, start_new_session=True, stdin=subprocess.DEVNULL
        )

        def said() -> str:
            log.seek(0)
            return log.read()[-4000:]

        def check() -> None:
            if process.poll() is not None:
                raise RuntimeError(f"{name} ended with {process.returncode}:\n{said()}")

        try:
            try:
                model = wait_until_served(PORTS[name], START_S, check)
            except TimeoutError as error:
                raise TimeoutError(f"{name}: {error}. It said:\n{said()}") from None
            yield PORTS[name], model
        finally:
            stop(process)


def stop(process: subprocess.Popen[str]) -> None:
    """As Ctrl-C does, and by force if that does not help."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
