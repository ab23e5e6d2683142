"""Engine replicas killed under load, on a cluster of its own: `benchmarks.chaos` in a size for every day."""

import asyncio
from collections.abc import Iterator

import httpx
import pytest

from benchmarks.chaos import torment
from benchmarks.pool import Pool, running


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with running(tmp_path_factory.mktemp("chaos"), replicas=3, ingresses=2, num_cpus=8) as pool:
        yield pool


def test_metrics_are_of_the_whole_application_whichever_ingress_is_asked(pool: Pool) -> None:
    bodies = [{"prompt": [5 + i], "max_tokens": 3, "ignore_eos": True} for i in range(12)]
    for body in bodies:
        with httpx.Client(
            base_url=pool.url, timeout=30
        ) as client:  # a connection each, so that both ingresses get some
            assert client.post("/v1/completions", json=body).status_code == 200

    def totals() -> set[tuple[float, ...]]:
        names = ("vllm:request_success_total", "vllm:generation_tokens_total", "nanoserve:ingress_replicas")
        seen = [pool.metrics() for _ in range(6)]
        return {(*(values[name] for name in names), values["nanoserve:engine_replicas"]) for values in seen}

    pool.wait(lambda: totals() == {(12, 36, 2, 3)}, 5, "both ingresses say the same")


def test_streams_outlive_their_replicas(pool: Pool) -> None:
    """One replica is killed, and then all at once."""
    report = asyncio.run(torment(pool, kills=2, streams=60, max_tokens=150, say=print, requests=8))
    assert report.wrong == []
    assert report.kills == 4
    assert report.streams >= 60
    assert report.failovers > 0
