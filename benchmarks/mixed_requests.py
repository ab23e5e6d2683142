"""Mixed traffic against a running server, checked against the offline engine.

    python -m benchmarks.mixed_requests [--url http://127.0.0.1:8000] [--model M] [--count 200] [--clients 32]

Sends completions of random lengths, half of them streamed, half of them sampled with a seed, and leaves every tenth
before it ends. Then runs those that stayed through `LLM.generate`, one at a time, and compares text, finish reason and
token counts; and reads `/metrics` until no request and no KV block is held. Ends with status 1 if anything differs.
The model must be the server's, with the same settings.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from engine.config import DEFAULT_MODEL
from engine.llm import LLM
from engine.sampling_params import SamplingParams
from tests.live_server import held_of


@dataclass(frozen=True)
class Plan:
    """One request. leave_after_s: when its client goes away; None if it stays."""

    prompt: list[int]
    max_tokens: int
    temperature: float
    seed: int
    stream: bool
    leave_after_s: float | None


@dataclass(frozen=True)
class Answer:
    text: str
    finish_reason: str
    completion_tokens: int


def draw(count: int, vocab_size: int, seed: int = 0) -> list[Plan]:
    rng = random.Random(seed)
    plans = []
    for i in range(count):
        prompt = [rng.randrange(3, min(vocab_size, 10_000)) for _ in range(rng.randint(1, 200))]
        temperature = rng.choice([0.0, 0.8])
        leave = rng.uniform(0.0, 1.0) if i % 10 == 9 else None
        plans.append(Plan(prompt, rng.randint(1, 64), temperature, rng.randrange(2**31), i % 2 == 0, leave))
    return plans


async def send(client: httpx.AsyncClient, plan: Plan) -> Answer | None:
    """The server's answer, or None if the client left before it."""
    body: dict[str, Any] = {
        "prompt": plan.prompt,
        "max_tokens": plan.max_tokens,
        "temperature": plan.temperature,
        "seed": plan.seed,
    }
    if plan.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    try:
        async with asyncio.timeout(plan.leave_after_s):
            return await (_stream(client, body) if plan.stream else _whole(client, body))
    except TimeoutError:
        if plan.leave_after_s is None:
            raise
        return None


async def _whole(client: httpx.AsyncClient, body: dict[str, Any]) -> Answer:
    response = await client.post("/v1/completions", json=body)
    response.raise_for_status()
    answer = response.json()
    choice = answer["choices"][0]
    return Answer(choice["text"], choice["finish_reason"], answer["usage"]["completion_tokens"])


async def _stream(client: httpx.AsyncClient, body: dict[str, Any]) -> Answer:
    text, reason, tokens, done = "", "", 0, False
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                done = True
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if chunk.get("usage"):
                tokens = chunk["usage"]["completion_tokens"]
            for choice in chunk["choices"]:
                text += choice["text"]
                reason = choice["finish_reason"] or reason
    if not done:
        raise RuntimeError("a stream ended without [DONE]")
    return Answer(text, reason, tokens)


async def drive(url: str, plans: Sequence[Plan], clients: int) -> list[Answer | None]:
    """Answers in the order of the plans, with at most `clients` requests at a time."""
    limit = asyncio.Semaphore(clients)

    async def one(plan: Plan) -> Answer | None:
        async with limit:
            return await send(client, plan)

    limits = httpx.Limits(max_connections=clients)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        return list(await asyncio.gather(*(one(plan) for plan in plans)))


def offline(llm: LLM, plan: Plan) -> Answer:
    params = SamplingParams(temperature=plan.temperature, seed=plan.seed, max_tokens=plan.max_tokens)
    output = llm.generate([plan.prompt], params, use_tqdm=False)[0].outputs[0]
    return Answer(output.text, output.finish_reason or "", len(output.token_ids))


def held(url: str) -> dict[str, float]:
    """Gauges that are not zero, of those that must be when nothing runs."""
    return held_of(httpx.get(f"{url}/metrics", timeout=30).raise_for_status().text)


def check(url: str, llm: LLM, count: int, clients: int) -> list[str]:
    """What was wrong; nothing, if all is well."""
    plans = draw(count, llm.engine.info.vocab_size)
    start = time.perf_counter()
    answers = asyncio.run(drive(url, plans, clients))
    elapsed = time.perf_counter() - start
    faults = []
    deadline = time.monotonic() + 5
    while (left := held(url)) and time.monotonic() < deadline:
        time.sleep(0.1)
    if left:
        faults.append(f"held after the last request: {left}")
    stayed = [(plan, answer) for plan, answer in zip(plans, answers, strict=True) if answer is not None]
    for plan, answer in stayed:
        if (expected := offline(llm, plan)) != answer:
            faults.append(f"{plan}\n  served  {answer}\n  offline {expected}")
    tokens = sum(answer.completion_tokens for _, answer in stayed)
    print(
        f"{count} requests, {len(plans) - len(stayed)} left early, {len(stayed)} compared; {tokens} tokens in "
        f"{elapsed:.1f} s; {len(faults)} faults"
    )
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--clients", type=int, default=32)
    args = parser.parse_args()
    llm = LLM(args.model)
    faults = check(args.url, llm, args.count, args.clients)
    print("\n".join(faults))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
