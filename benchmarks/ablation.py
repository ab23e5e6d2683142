"""What each scheduling feature is worth: the same load with the feature on and off, in alternation.

    python -m benchmarks.ablation [--model M] [--repeat 3] [--json]

continuous: 32 requests of 25-256 tokens in and out. Static batching gives the next 8 requests only when the last of the
    8 before has ended; continuous batching fills each place as it falls free (max_num_seqs 8 in both).
chunked: 8 streams run while 8 prompts of 1,500 tokens arrive; mixed, their chunks share steps with the decodes, and
    apart, prompts are computed whole. The figure is the streams' longest gap, beside the time of it all.
prefix: 32 requests that share 512 tokens of their prompts, 32 tokens out.
overlap: two steps in flight instead of one, on 32 sequences. A CPU's launch returns when its step is done, so nothing
    overlaps; on a GPU the host's share of a step (`benchmarks.host_overhead`) is hidden.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from engine.config import DEFAULT_MODEL
from engine.llm import LLM
from engine.sampling_params import SamplingParams

Figures = dict[str, float]


def prompts(rng: random.Random, lengths: Sequence[int]) -> list[list[int]]:
    return [[rng.randint(3, 10_000) for _ in range(length)] for length in lengths]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens)


def generate(llm: LLM, batch: list[list[int]], outs: Sequence[int]) -> None:
    llm.generate(batch, [greedy(n) for n in outs], use_tqdm=False)


def continuous(llm: LLM, on: bool) -> Figures:
    rng = random.Random(1)
    batch = prompts(rng, [rng.randint(25, 256) for _ in range(32)])
    outs = [rng.randint(25, 256) for _ in batch]
    start = time.perf_counter()
    if on:
        generate(llm, batch, outs)
    else:
        for i in range(0, len(batch), 8):
            generate(llm, batch[i : i + 8], outs[i : i + 8])
    elapsed = time.perf_counter() - start
    return {"seconds": elapsed, "out_tok_s": sum(outs) / elapsed}


def chunked(llm: LLM, on: bool) -> Figures:
    engine = llm.engine
    rng = random.Random(2)
    for i, prompt in enumerate(prompts(rng, [32] * 8)):
        engine.add_request(f"stream {i}", prompt, greedy(200))
    start = last = time.perf_counter()
    longest, tokens = 0.0, 0
    while engine.has_work():
        output = engine.step()
        tokens += len(output.token_ids)
        now = time.perf_counter()
        if any(name.startswith("stream") for name in output.request_ids):
            longest, last = max(longest, now - last), now
        if tokens and not engine.scheduler.num_waiting and tokens % 80 == 0 and tokens <= 640:
            (prompt,) = prompts(rng, [1500])
            engine.add_request(f"prompt {tokens}", prompt, greedy(1))
    return {"seconds": time.perf_counter() - start, "longest_gap_ms": longest * 1e3}


def prefix(llm: LLM, on: bool) -> Figures:
    rng = random.Random(time.time_ns())
    (shared,) = prompts(rng, [512])
    batch = [shared + own for own in prompts(rng, [16] * 32)]
    start = time.perf_counter()
    generate(llm, batch, [32] * 32)
    return {"seconds": time.perf_counter() - start}


def overlap(llm: LLM, on: bool) -> Figures:
    rng = random.Random(3)
    start = time.perf_counter()
    generate(llm, prompts(rng, [64] * 32), [96] * 32)
    elapsed = time.perf_counter() - start
    return {"seconds": elapsed, "out_tok_s": 32 * 96 / elapsed}


LOADS: dict[str, tuple[Callable[[LLM, bool], Figures], dict[str, Any], dict[str, Any]]] = {
    # the load, settings with the feature, settings without
    "continuous": (continuous, {"max_num_seqs": 8}, {"max_num_seqs": 8}),
    "chunked": (chunked, {}, {"enable_chunked_prefill": False}),
    "prefix": (prefix, {}, {"enable_prefix_caching": False}),
    "overlap": (overlap, {"async_scheduling": True}, {"async_scheduling": False}),
}


def compare(name: str, model: str, repeat: int) -> dict[str, Any]:
    load, with_it, without = LOADS[name]
    engines = {True: LLM(model, max_model_len=2048, **with_it), False: LLM(model, max_model_len=2048, **without)}
    for llm in engines.values():
        generate(llm, [[1, 2, 3]], [4])
    runs: dict[bool, list[Figures]] = {True: [], False: []}
    for _ in range(repeat):
        for on, llm in engines.items():
            runs[on].append(load(llm, on))
    for llm in engines.values():
        llm.close()
    row: dict[str, Any] = {"feature": name}
    for on, label in ((True, "on"), (False, "off")):
        row[label] = {key: round(statistics.median(run[key] for run in runs[on]), 3) for key in runs[on][0]}
    row["speedup"] = round(row["off"]["seconds"] / row["on"]["seconds"], 2)
    return row


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--features", default=",".join(LOADS))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    for name in args.features.split(","):
        row = compare(name, args.model, args.repeat)
        if args.json:
            print(json.dumps(row), flush=True)
        else:
            print(f"{name:11s} speedup {row['speedup']:5.2f}  on {row['on']}  off {row['off']}", flush=True)


if __name__ == "__main__":
    main()
