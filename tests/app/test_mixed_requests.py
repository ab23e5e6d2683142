"""Mixed traffic through HTTP gives what the offline engine gives; the same check serves by hand at full size."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.mixed_requests import check
from engine.llm import LLM
from tests.app.conftest import Serve

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two steps in flight": {"async_scheduling": True},
    "a pool that preempts": {"num_gpu_blocks_override": 20, "async_scheduling": True},
    "small chunks": {"max_num_batched_tokens": 48},
}


@pytest.fixture(scope="module")
def llm(model_dir: Path) -> Iterator[LLM]:
    llm = LLM(model_dir, dtype="float32", max_model_len=288, num_gpu_blocks_override=128, num_threads=1)
    yield llm
    llm.close()


@pytest.mark.parametrize("name", SETTINGS)
async def test_mixed_requests_equal_the_offline_engine(real: Serve, llm: LLM, name: str) -> None:
    settings = {"max_model_len": 288, "num_gpu_blocks_override": 128} | SETTINGS[name]
    async with real(**settings) as server:
        assert await asyncio.to_thread(check, server.url, llm, 60, 16) == []
        if "preempts" in name:
            assert server.replica.stats().preemptions > 0


async def test_the_check_sees_wrong_answers(scripted: Serve, llm: LLM) -> None:
    async with scripted("not what the model says", max_model_len=288, num_blocks=512) as server:
        assert len(await asyncio.to_thread(check, server.url, llm, 20, 4)) >= 15
