"""What all that starts a server on this machine needs: a port, and a look at what the server holds."""

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
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def values_of(metrics: str) -> dict[str, float]:
    """Values of Prometheus text by the names of their series; of several by one name, the last."""
    lines = [line for line in metrics.splitlines() if line and not line.startswith("#")]
    return {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in lines}


def held_of(metrics: str) -> dict[str, float]:
    """What is under way, by `HELD`; empty if nothing is."""
    values = values_of(metrics)
    return {name: values[name] for name in HELD if values[name]}
