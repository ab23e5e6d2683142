"""A burst on an application that had scaled to zero: nothing is lost, and nothing stays."""

import asyncio
from pathlib import Path

import httpx
import pytest
from ray import serve

import app
from benchmarks.burst import ask_replicas, burst, wait_for
from tests import tiny_models
from tests.app.cluster.conftest import URL


@pytest.fixture(scope="module")
def scaled_to_zero(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> str:
    model: Path = tiny_models.llama(tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=2048)
    settings = {
        "model": str(model), "max_model_len": 1024, "num_gpu_blocks_override": 600, "num_threads": 1,
        "max_num_seqs": 2, "max_queue_size": 16, "stream_commit_s": 0.2,
        "min_replicas": 0, "max_replicas": 2, "downscale_delay_s": 3, "downscale_to_zero_delay_s": 3,
    }  # fmt: skip
    serve.run(app.build(settings), name="nanoserve", route_prefix="/")
    wait_for(0, 60)
    return URL


def test_a_burst_from_nothing_is_served_whole_and_leaves_nothing(scaled_to_zero: str) -> None:
    # Enough work that it outlasts the start of a second replica: two at a time, 800 steps each.
    outcomes, course = asyncio.run(burst(scaled_to_zero, clients=24, max_tokens=800))
    assert [outcome.error for outcome in outcomes] == [None] * 24
    assert all(outcome.done and outcome.tokens == 800 for outcome in outcomes)
    refused = [outcome for outcome in outcomes if outcome.retry_after]
    assert len(refused) >= 5, "one calls for a replica, sixteen wait: the others are sent away with a time"
    assert len({outcome.retry_after[0] for outcome in refused}) > 1, "and not all with the same"
    assert course.counts[0][1] == 0
    assert course.most == 2
    wait_for(0, 60)


def test_what_comes_later_starts_a_replica_again(scaled_to_zero: str) -> None:
    wait_for(0, 60)
    health, metrics = (httpx.get(f"{scaled_to_zero}/{path}", timeout=10) for path in ("health", "metrics"))
    assert (health.status_code, metrics.status_code) == (200, 200), "asleep is not ill"
    assert "nanoserve:engine_replicas{model_name=" in metrics.text
    (outcome,), _ = asyncio.run(burst(scaled_to_zero, clients=1, max_tokens=4))
    assert (outcome.tokens, outcome.tries) == (4, 1)
    (times,) = asyncio.run(ask_replicas("startup_times"))
    assert times.load_s > 0
    assert times.process_s > 0
