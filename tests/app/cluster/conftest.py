"""One cluster, with Serve on it, for all modules here: each finds it empty and leaves it so."""

from collections.abc import Iterator

import pytest
import ray
from ray import serve

from benchmarks.pools.local import APP, local_cluster, session_logs
from tests.live_server import free_port

PORT = free_port()
URL = f"http://127.0.0.1:{PORT}"


def went_on() -> int:
    """Requests that went on elsewhere, by the logs, since the counters of an ingress end with it."""
    files = session_logs().glob("serve/replica_*ingress*.log")
    return sum(file.read_text(errors="replace").count("goes on elsewhere") for file in files)


@pytest.fixture(scope="package")
def cluster() -> Iterator[None]:
    with local_cluster(num_cpus=4, port=PORT):
        yield


@pytest.fixture(scope="module", autouse=True)
def _empty() -> Iterator[None]:
    yield
    if ray.is_initialized() and APP in serve.status().applications:
        serve.delete(APP)
