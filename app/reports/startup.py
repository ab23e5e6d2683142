"""How long a replica took to come up, by part."""

import os
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class StartupTimes:
    """Seconds. process_s: from the start of the worker's process to the constructor: Python, Ray, imports. An idle
    worker that Ray had ready counts as started when it was made. load_s: the constructor: torch, kernels, weights, KV
    cache. began_at, ready_at: by the wall clock."""

    process_s: float
    load_s: float
    began_at: float
    ready_at: float

    def __str__(self) -> str:
        return f"process and imports {self.process_s:.2f} s, engine {self.load_s:.2f} s"


class Startup:
    """Made when the constructor begins, `done` when it ends."""

    def __init__(self) -> None:
        self._began_at = time.time()

    def done(self) -> StartupTimes:
        now = time.time()
        began = self._began_at
        return StartupTimes(began - process_started_at(), now - began, began, now)


def process_started_at() -> float:
    """By the wall clock, from Linux's /proc; where there is none, now."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except OSError:
        return time.time()
    return time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")
