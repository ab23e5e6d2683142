"""Replicas that are told to go: by SIGTERM, or because fewer are wanted. No stream breaks."""

import asyncio
import signal
from collections.abc import Callable, Iterator

import pytest

from benchmarks.chaos import Report, Traffic
from benchmarks.pools.local import Pool, application, kill
from tests.app.cluster.conftest import PORT, went_on
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
