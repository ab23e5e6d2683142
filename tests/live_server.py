"""What all that starts a server on this machine needs: a port, and a look at what the server holds."""

import contextlib
import secrets
import socket

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
