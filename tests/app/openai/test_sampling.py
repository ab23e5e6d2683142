"""Sampling parameters through HTTP, on a tiny random model."""

import asyncio
from typing import Any

import pytest

from engine.sampling_params import SamplingParams
from tests.app.conftest import Serve
from tests.app.harness import Server
from tests.tiny_models import VOCAB_SIZE


async def text(server: Server, **body: Any) -> str:
    result: str = (await server.complete("The quick brown", max_tokens=12, ignore_eos=True, **body)).json()["choices"][
        0
    ]["text"]
    return result


async def test_temperatures_towards_zero_are_greedy(real: Serve) -> None:
    async with real() as server:
        greedy = await text(server, temperature=0)
        assert greedy
        assert await text(server, temperature=1e-6) == greedy
        assert await text(server, temperature=0, top_p=0.5) == greedy
        assert await text(server, temperature=0, top_k=3, min_p=0.2, seed=5) == greedy
        assert await text(server, temperature=1e-4)


async def test_a_seed_decides_whatever_else_runs(real: Serve) -> None:
    async with real() as server:
        alone = await text(server, seed=42)
        mixed = await asyncio.gather(
            text(server, seed=42), text(server), text(server, seed=42), text(server), text(server, seed=7)
        )
        assert mixed[0] == mixed[2] == alone
        assert mixed[4] != alone


async def test_seed_zero_is_a_seed(real: Serve) -> None:
    async with real() as server:
        first, second = await text(server, seed=0), await text(server, seed=0)
        assert first == second
        assert len({await text(server) for _ in range(5)}) > 1


async def test_a_seed_that_is_not_given_is_drawn_before_the_engine(
    real: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a replica that took a request over would go on with another one."""
    async with real() as server:
        seeds: list[int | None] = []
        add = server.engine.add_request

        def noted(request_id: str, prompt_ids: list[int], params: SamplingParams, *args: Any, **more: Any) -> None:
            seeds.append(params.seed)
            add(request_id, prompt_ids, params, *args, **more)

        monkeypatch.setattr(server.engine, "add_request", noted)
        for _ in range(2):
            await server.chat(max_tokens=1)
            await server.complete("a", max_tokens=1)
        assert None not in seeds
        assert len(set(seeds)) == 4


@pytest.mark.parametrize(
    "extreme",
    [
        {"top_p": 1e-50},  # 0 in float32
        {"min_tokens": 3, "stop_token_ids": list(range(VOCAB_SIZE))},  # no token is allowed at all
        {"min_p": 1.0, "top_k": 1, "top_p": 1e-30, "temperature": 100.0},
    ],
)
async def test_an_extreme_request_harms_neither_the_engine_nor_its_neighbours(real: Serve, extreme: Any) -> None:
    async with real() as server:
        alone = (await server.complete("hello", temperature=0, max_tokens=12, ignore_eos=True)).json()
        beside, extreme_answer = await asyncio.gather(
            server.complete("hello", temperature=0, max_tokens=12, ignore_eos=True),
            server.complete("hello", max_tokens=8, seed=1, **extreme),
        )
        assert extreme_answer.status_code == 200
        assert beside.json()["choices"] == alone["choices"]
