"""The application as a person starts it, on a port of its own, and stopped cleanly."""

import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.live_server import HELD, ServerProcess, free_port, server_process, values_of

START_LIMIT_S = 180

SETTINGS: dict[str, Any] = {"quantization": "none", "kv_cache_dtype": "float32", "max_model_len": 2048}
"""float32, whatever the default is, since scores are compared with another implementation's."""


@dataclass(frozen=True, slots=True)
class Running:
    url: str
    model: str
    pid: int

    def held(self) -> dict[str, float]:
        values = values_of(httpx.get(f"{self.url}/metrics", timeout=30).text)
        return {name: values[name] for name in HELD}

    def wait_idle(self, within_s: float = 60) -> dict[str, float]:
        """The gauges, as soon as all of them are zero, or after `within_s`."""
        deadline = time.monotonic() + within_s
        while any((held := self.held()).values()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return held

    def memory(self) -> dict[str, float]:
        """Resident MiB of each replica process, by its deployment's name."""
        sizes = {}
        for process in _descendants(self.pid):
            try:
                title = Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                status = Path(f"/proc/{process}/status").read_text()
            except OSError:  # it has ended
                continue
            if found := re.search(r"ServeReplica:\w+:(\w+)", title):
                match = re.search(r"VmRSS:\s+(\d+)", status)
                sizes[found[1]] = round(int(match[1]) / 1024, 1) if match else 0.0
        return sizes


@contextmanager
def serve(**settings: Any) -> Iterator[Running]:
    """`serve run` with `settings` over `SETTINGS`. Raises `RuntimeError` with the log's end if it does not start."""
    port = free_port()
    config = {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [
            {"name": "nanoserve", "route_prefix": "/", "import_path": "app:build", "args": SETTINGS | settings}
        ],
    }
    with tempfile.TemporaryDirectory(prefix="nanoserve-conformance-") as folder:
        file = Path(folder, "serve.yaml")
        file.write_text(json.dumps(config))  # JSON is YAML
        words = [sys.executable, "-m", "ray.serve.scripts", "run", "--address", "local", str(file)]
        with server_process(words) as server:
            url = f"http://127.0.0.1:{port}"
            yield Running(url, _wait_until_up(url, server), server.process.pid)


def _wait_until_up(url: str, server: ServerProcess) -> str:
    """The served model's name."""
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        server.check()
        try:
            response = httpx.get(f"{url}/v1/models", timeout=5)
            if response.status_code == 200:
                name: str = response.json()["data"][0]["id"]
                return name
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise RuntimeError(f"the server did not start:\n{server.said()}")


def _descendants(root: int) -> list[int]:
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text()
        except OSError:
            continue
        parents[int(folder.name)] = int(stat.rsplit(")", 1)[1].split()[1])
    found = {root}
    while more := {child for child, parent in parents.items() if parent in found and child not in found}:
        found |= more
    return sorted(found)
