"""How long a running stream stands still while a prompt of maximum length arrives, through a running server.

    python -m benchmarks.stream_gap [--url http://127.0.0.1:8000] [--chunk 512] [--repeat 3] [--json]

A step computes at most `max_num_batched_tokens` (--chunk), so a long prompt holds a stream up by one chunk and no more.
The chunk that costs most is the last one, whose attention spans the whole prompt; its time is the difference of
the times to first token of two prompts, alone on the server, that are one chunk apart. Prompts are random and new each
time: the prefix cache gives nothing.
"""

import argparse
import asyncio
import itertools
import json
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import httpx

STREAM_TOKENS = 400
WARM_TOKENS = 20


async def time_to_first_token(client: httpx.AsyncClient, prompt: list[int]) -> float:
    start = time.perf_counter()
    response = await client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1, "temperature": 0})
    response.raise_for_status()
    return time.perf_counter() - start


async def gaps_of_a_stream(client: httpx.AsyncClient, prompt: list[int], long_prompt: list[int] | None) -> list[float]:
    """Seconds between a stream's events; `long_prompt` is sent when the stream is under way."""
    body = {"prompt": prompt, "max_tokens": STREAM_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    times: list[float] = []
    other = None
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                times.append(time.perf_counter())
                if long_prompt is not None and len(times) == WARM_TOKENS:
                    other = asyncio.ensure_future(time_to_first_token(client, long_prompt))
    if other is not None:
        await other
    return [later - earlier for earlier, later in itertools.pairwise(times[1:])]


async def measure(url: str, chunk: int, repeat: int) -> dict[str, Any]:
    rng = random.Random(time.time_ns())

    def prompt(length: int) -> list[int]:
        return [rng.randint(3, 10_000) for _ in range(length)]

    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        card = (await client.get("/v1/models")).raise_for_status().json()["data"][0]
        longest = card["max_model_len"] - 2
        await time_to_first_token(client, prompt(chunk))
        last_chunks, alone, beside = [], [], []
        for _ in range(repeat):
            whole = await time_to_first_token(client, prompt(longest))
            last_chunks.append(whole - await time_to_first_token(client, prompt(longest - chunk)))
            alone.append(max(await gaps_of_a_stream(client, prompt(16), None)))
            beside.append(max(await gaps_of_a_stream(client, prompt(16), prompt(longest))))
    step = statistics.median(last_chunks)
    return {
        "prompt_tokens": longest,
        "chunk": chunk,
        "last_chunk_ms": round(step * 1e3, 1),
        "largest_gap_alone_ms": round(statistics.median(alone) * 1e3, 1),
        "largest_gap_ms": round(statistics.median(beside) * 1e3, 1),
        "gap_in_chunk_steps": round(statistics.median(beside) / step, 2),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--chunk", type=int, default=512, help="the server's max_num_batched_tokens")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    figures = asyncio.run(measure(args.url, args.chunk, args.repeat))
    print(json.dumps(figures) if args.json else "  ".join(f"{key}={value}" for key, value in figures.items()))


if __name__ == "__main__":
    main()
