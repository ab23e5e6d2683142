"""ray_configs/production.yaml as it is started: HAProxy at the door, throughput mode, keys, JSON logs.

Of the installed wheel, in a folder without the sources, as in an image.
"""

import contextlib
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from tests import tiny_models
from tests.app.harness import parse_events
from tests.live_server import REPOSITORY, ServerProcess, free_port, server_process

KEY = "sk-production"
START_S = 90
END_S = 30


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A short path, since Ray puts sockets there."""
    with tempfile.TemporaryDirectory(prefix="ns") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def url() -> str:
    return f"http://127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def server(folder: Path, wheel: Path, url: str) -> Iterator[ServerProcess]:
    text = (REPOSITORY / "ray_configs" / "production.yaml").read_text()
    config = yaml.safe_load(text)
    config["http_options"] = {"host": "127.0.0.1", "port": int(url.rpartition(":")[2])}
    (folder / "keys").write_text(f"# who may come in\n{KEY}\n")
    model = str(tiny_models.llama(folder / "tiny", max_position_embeddings=8192))
    config["applications"][0]["args"] |= {"model": model, "api_keys_file": str(folder / "keys")}
    (folder / "serve.yaml").write_text(yaml.safe_dump(config))
    environment = os.environ | {
        **dict(re.findall(r"(RAY_\w+)=(\w+)", text)),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1",  # else what is logged waits for more
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0.1",  # only how long the end takes
        "RAY_TMPDIR": str(folder),
        "PYTHONPATH": str(wheel),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    words = [sys.executable, "-m", "ray.serve.scripts", "run", "--address", "local", str(folder / "serve.yaml")]
    with server_process(words, environment, folder) as server:
        deadline = time.monotonic() + START_S
        while not is_up(url):
            server.check()
            assert time.monotonic() < deadline, server.said()
            time.sleep(0.2)
        yield server


def is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/v1/models", headers={"Authorization": f"Bearer {KEY}"}, timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def test_it_answers_those_who_have_a_key(server: ServerProcess, url: str, folder: Path) -> None:
    body = {"prompt": "hello", "max_tokens": 20, "ignore_eos": True, "temperature": 0}
    with httpx.Client(base_url=url, timeout=60) as http:
        assert http.post("/v1/completions", json=body).status_code == 401
        assert http.get("/health").status_code == 200
        http.headers["Authorization"] = f"Bearer {KEY}"
        whole = http.post("/v1/completions", json=body).json()
        assert whole["usage"]["completion_tokens"] == 20
        events = parse_events(http.post("/v1/completions", json=body | {"stream": True}))
        assert (events.done, events.text) == (True, whole["choices"][0]["text"])
    (haproxy,) = folder.rglob("haproxy.cfg")
    assert f"127.0.0.1{url.removeprefix('http://127.0.0.1')}" in haproxy.read_text()


def test_the_applications_logs_are_json(server: ServerProcess, folder: Path) -> None:
    """Those of Serve's own processes only where Serve is started by `serve deploy`, which is not tried here."""
    logs = list(folder.rglob("session_latest/logs/serve/replica_*.log"))
    for kind in ("engine", "ingress"):
        lines = [line for log in logs if kind in log.name for line in log.open()]
        assert lines, [log.name for log in logs]
        assert all("message" in json.loads(line) for line in lines)


def test_sigterm_ends_all_of_it(server: ServerProcess, url: str, folder: Path) -> None:
    """As systemd sends it: streams that run break off, which says that they are not whole, and no process is left."""
    body = {"prompt": "hello", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    headers = {"Authorization": f"Bearer {KEY}"}
    assert processes(folder)
    with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=headers, timeout=60) as response:
        assert response.status_code == 200
        parts = response.iter_bytes()
        got = next(parts)
        server.process.terminate()
        with contextlib.suppress(httpx.HTTPError):
            got += b"".join(parts)
    assert b"[DONE]" not in got
    server.process.wait(END_S)
    deadline = time.monotonic() + END_S
    while left := processes(folder):
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def processes(folder: Path) -> list[str]:
    """Those that have Ray's folder from the environment of `serve run`, by their command lines."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"RAY_TMPDIR={folder}".encode() in (path / "environ").read_bytes().split(b"\0"):
                found.append((path / "cmdline").read_text().replace("\0", " ")[:200])
    return found
