"""What all that starts a server on this machine needs: a port, its process, and a look at what the server holds."""

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

REPOSITORY = Path(__file__).parents[1]
STOP_LIMIT_S = 60

HELD = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "nanoserve:live_blocks",
    "nanoserve:ingress_outstanding",
    "nanoserve:ingress_queued",
)
"""Gauges that are zero when nothing is under way."""


def free_port() -> int:
    """Of those that the system gives to no outgoing connection and Ray to no worker: still free when it is used."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def values_of(metrics: str) -> dict[str, float]:
    """Values of Prometheus text by the names of their series; of several by one name, the last."""
    lines = [line for line in metrics.splitlines() if line and not line.startswith("#")]
    return {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in lines}


def held_of(metrics: str) -> dict[str, float]:
    """What is under way, by `HELD`; empty if nothing is."""
    values = values_of(metrics)
    return {name: values[name] for name in HELD if values[name]}


class ServerProcess:
    """A server that was started as a person would, and what it has said."""

    def __init__(self, process: "subprocess.Popen[Any]", log: IO[bytes]) -> None:
        self.process = process
        self._log = log

    def said(self) -> str:
        """The end of it."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-4000:]

    def check(self) -> None:
        """Raise `RuntimeError` if it has ended."""
        if self.process.poll() is not None:
            raise RuntimeError(f"the server ended with {self.process.returncode}:\n{self.said()}")


@contextlib.contextmanager
def server_process(
    words: Sequence[str], environment: Mapping[str, str] | None = None, folder: Path = REPOSITORY
) -> Iterator[ServerProcess]:
    """Start a server by its command line; stopped as by Ctrl-C, and by force if that is not enough.

    environment: all of it; by default this process's, without Ray's statistics. folder: where it is started.
    """
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            words,
            cwd=folder,
            env=os.environ | {"RAY_USAGE_STATS_ENABLED": "0"} if environment is None else environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield ServerProcess(process, log)
        finally:
            stop(process)


def stop(process: "subprocess.Popen[Any]") -> None:
    """As Ctrl-C does, and its whole group by force if that does not help."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
