"""What HTTP costs: streams through a server on this machine beside the same prompts offline, and beside other servers.

    python -m benchmarks.serving [--servers nanoserve,nanoserve-haproxy,vllm,llamacpp] [--precision fp32|int8]
        [--streams 32] [--rounds 3]

streams: that many completions at once over loopback, prompts of 128 random tokens, 128 tokens out; tokens per second
    from the first request to the last byte. The client runs on the same cores. Offline is `LLM.generate` with the same
    prompts, in turn with them.
time to first token: of lone requests of 128 random tokens, medians, beside what `LLM.generate` takes for one token.

nanoserve is `serve run`; nanoserve-haproxy the same with HAProxy before it and Serve in its throughput mode. One
server runs at a time. With int8, llama.cpp serves Q8_0 and vLLM still float32.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import report
from benchmarks.peer.engines import PeerEngine, random_prompts, start
from benchmarks.servers.client import stream
from benchmarks.servers.processes import KNOWN_SERVERS, command, is_own, serving
from engine.config import DEFAULT_MODEL

TOKENS = 128
LONE_REQUESTS = 15


async def streams_rate(port: int, model: str, prompts: Sequence[list[int]]) -> float:
    """Output tokens per second of all prompts streamed at once."""
    began = time.perf_counter()
    done = await asyncio.gather(*(stream(port, model, prompt, TOKENS) for prompt in prompts))
    seconds = time.perf_counter() - began
    if any(streamed.tokens != TOKENS for streamed in done):
        raise RuntimeError("a server made another number of tokens than asked for: the figure would be wrong")
    return len(done) * TOKENS / seconds


def first_token_s(port: int, model: str, prompt: list[int]) -> float:
    return asyncio.run(stream(port, model, prompt, 4)).first


def measure(port: int, model: str, offline: PeerEngine | None, streams: int, rounds: int) -> dict[str, Any]:
    """Figures of one server; with an offline engine, what it does with the same prompts, in alternation."""
    rng = random.Random(0)
    asyncio.run(streams_rate(port, model, random_prompts(rng, [16] * 4)))
    served, alone, first, first_alone = [], [], [], []
    for _ in range(rounds):
        prompts = random_prompts(rng, [TOKENS] * streams)
        served.append(asyncio.run(streams_rate(port, model, prompts)))
        if offline is not None and (seconds := offline.seconds(prompts, [TOKENS] * streams)) is not None:
            alone.append(TOKENS * streams / seconds)
    for _ in range(LONE_REQUESTS):
        prompt = random_prompts(rng, [TOKENS])
        first.append(first_token_s(port, model, prompt[0]) * 1e3)
        if offline is not None and (seconds := offline.seconds(prompt, [1])) is not None:
            first_alone.append(seconds * 1e3)
    figures = {"tok_s": round(statistics.median(served), 1), "first_token_ms": round(statistics.median(first), 1)}
    if alone:
        figures["offline_tok_s"] = round(statistics.median(alone), 1)
        figures["share_of_offline"] = round(statistics.median(a / b for a, b in zip(served, alone, strict=True)), 2)
        figures["first_token_offline_ms"] = round(statistics.median(first_alone), 1)
        pairs = zip(first, first_alone, strict=True)
        figures["first_token_added_ms"] = round(statistics.median(a - b for a, b in pairs), 1)
    return figures | {"tok_s_rounds": [round(rate, 1) for rate in served]}


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", default=",".join(KNOWN_SERVERS))
    parser.add_argument("--precision", choices=["fp32", "int8"], default="fp32")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--results", type=Path, default=report.RESULTS)
    args = parser.parse_args(argv)
    servers = args.servers.split(",")
    if unknown := set(servers) - set(KNOWN_SERVERS):
        parser.error(f"unknown servers {', '.join(sorted(unknown))}; known are {', '.join(KNOWN_SERVERS)}")
    rows = []
    for name in servers:
        offline = start("nanoserve", args.precision, args.model, args.threads) if is_own(name) else None
        try:
            with serving(name, command(name, args.precision, args.model, args.threads)) as (port, model):
                rows.append({"server": name} | measure(port, model, offline, args.streams, args.rounds))
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        finally:
            if offline is not None:
                offline.close()
    if rows[0]["server"] == "nanoserve":
        for row in rows[1:]:
            row["nanoserve_ratio"] = round(rows[0]["tok_s"] / row["tok_s"], 2)
    about = {"precision": args.precision, "streams": args.streams, "rounds": args.rounds}
    head = report.header(argv, "benchmarks.serving", **about)
    print(report.markdown(head, rows))
    report.save(args.results, f"serving-{args.precision}-{'-'.join(servers)}", head, rows)


if __name__ == "__main__":
    main()
