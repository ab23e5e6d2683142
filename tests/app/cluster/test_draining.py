"""Replicas that are told to go: by SIGTERM, because fewer are wanted, with their application. No stream just breaks."""

import asyncio
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from ray import serve

from benchmarks.chaos import Report, Traffic
from benchmarks.pools.local import APP, Pool, application, kill
from tests.app.cluster.conftest import PORT, ask_and, went_on
from tests.app.harness import until

BODIES = [
    {"prompt": [5 + i], "max_tokens": 300 + 100 * i, "ignore_eos": True, "stream": True, "return_token_ids": True,
     "temperature": 1.0, "seed": i}
    for i in range(4)
]  # fmt: skip


@pytest.fixture(scope="module")
def pool(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with application(PORT, tmp_path_factory.mktemp("draining"), replicas=2) as pool:
        yield pool


def assert_all_end_whole(pool: Pool, act: Callable[[], object]) -> None:
    """Streams that are open while `act` runs, and those that come, have the tokens of an undisturbed run."""
    report = Report()

    async def stream() -> None:
        async with Traffic(pool, BODIES, 8, report):
            await until(lambda: report.streams >= 4, 30)
            await asyncio.to_thread(act)

    asyncio.run(stream())
    assert report.wrong == []
    assert report.streams >= 12
    pool.wait(lambda: not pool.held(), 10, "nothing held")


def test_an_engine_replica_that_gets_sigterm_is_a_pause_in_its_streams(pool: Pool) -> None:
    def end_one() -> None:
        kill(pool.engine_pids()[0], signal.SIGTERM)
        pool.wait(lambda: not pool.is_whole(), 10, "the replica gone")
        pool.wait(pool.is_whole, 60, "the pool whole again")

    before = went_on()
    assert_all_end_whole(pool, end_one)
    assert went_on() > before


def test_a_replica_too_many_ends_what_it_runs(pool: Pool) -> None:
    before = went_on()

    def shrink() -> None:
        pool.deploy(num_replicas=1)
        pool.wait(lambda: len(pool.engine_pids()) == 1, 30, "one replica")

    assert_all_end_whole(pool, shrink)
    assert went_on() == before, "each had the time to end where it was"


def test_an_ingress_that_gets_sigterm_ends_its_streams(pool: Pool) -> None:
    (pid,) = pool.ingress_pids()
    events = ask_and(pool, lambda: kill(pid, signal.SIGTERM), *[1500] * 8)
    assert [(each.done, each.finish_reasons) for each in events] == [(True, ["length"])] * 8


def test_the_end_of_the_application_gives_its_streams_some_time_and_leaves_nothing(pool: Pool) -> None:
    """12 of them want more than they get."""
    pool.deploy(num_replicas=1, max_model_len=8192, graceful_shutdown_timeout_s=2.0)
    pids = [*pool.engine_pids(), *pool.ingress_pids()]
    events = ask_and(pool, lambda: serve.delete(APP), *[100] * 4, *[8000] * 12)
    assert [(each.done, each.finish_reasons) for each in events[:4]] == [(True, ["length"])] * 4
    assert [(each.done, each.names) for each in events[4:]] == [(False, ["error"])] * 12
    assert httpx.get(f"{pool.url}/health").status_code == 404
    pool.wait(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 20, "its processes gone")


def test_streams_that_wait_for_a_replica_end_when_their_application_does(pool: Pool) -> None:
    pool.deploy(num_replicas=1, max_model_len=8192)

    def kill_and_delete() -> None:
        before = went_on()
        kill(pool.engine_pids()[0])
        pool.wait(lambda: went_on() >= before + 4, 10, "all wait to go on")
        serve.delete(APP)

    events = ask_and(pool, kill_and_delete, *[8000] * 4)
    assert [(each.done, each.names) for each in events] == [(False, ["error"])] * 4
    assert all("No engine is left" in each.chunks[-1]["error"]["message"] for each in events)
