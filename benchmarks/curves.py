"""How cost grows: decode speed against batch, context and waiting requests, beside peers in alternation.

    python -m benchmarks.curves [--peers openvino,llamacpp] [--curves batch,context,waiting] [--precision fp32|int8]

batch: decode tokens per second at batch 1 to 128; prompts of 64 tokens, 64 out.
context: milliseconds of a decode step of one sequence whose context begins at 128 to 4,096 tokens; 128 steps.
waiting: milliseconds of a decode step of 16 running sequences while others wait; this engine alone, through `Engine`.

Medians over the rounds. The table goes to standard output, and with a plot into --results.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import report
from benchmarks.peer.engines import (
    KNOWN_PEERS,
    PeerEngine,
    nanoserve_settings,
    random_prompts,
    running,
)
from engine.config import DEFAULT_MODEL, EngineConfig
from engine.engine import Engine
from engine.sampling_params import SamplingParams

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
BATCH_TOKENS = 64
CONTEXTS = (128, 256, 512, 1024, 2048, 4096)
CONTEXT_STEPS = 128
NUM_WAITING = (0, 100, 1000)
NUM_RUNNING = 16
WAITING_STEPS = 100

Figures = dict[str, list[float]]
"""Of one point, by engine, one for each round."""


def batch_point(engine: PeerEngine, batch: int, seed: int) -> float:
    return engine.rates(batch, BATCH_TOKENS, BATCH_TOKENS, seed).decode


def context_point(engine: PeerEngine, context: int, seed: int) -> float:
    return 1e3 / engine.rates(1, context, CONTEXT_STEPS + 1, seed).decode


def alternate(
    engines: dict[str, PeerEngine],
    points: Sequence[int],
    rounds: int,
    figure: Callable[[PeerEngine, int, int], float],
) -> dict[int, Figures]:
    found: dict[int, Figures] = {x: {name: [] for name in engines} for x in points}
    for seed in range(rounds):
        for x in points:
            for name, engine in engines.items():
                found[x][name].append(figure(engine, x, seed))
    return found


def waiting_points(precision: str, model: str, threads: int, rounds: int) -> dict[int, Figures]:
    settings = nanoserve_settings(precision) | {"model": model, "num_threads": threads}
    engine = Engine.from_config(EngineConfig(**settings, max_num_seqs=NUM_RUNNING, enable_prefix_caching=False))
    found: dict[int, Figures] = {x: {"nanoserve": []} for x in NUM_WAITING}
    for seed in range(rounds):
        for count in NUM_WAITING:
            found[count]["nanoserve"].append(step_ms(engine, count, seed))
    engine.close()
    return found


def step_ms(engine: Engine, num_waiting: int, seed: int) -> float:
    """Mean time of a decode step of `NUM_RUNNING` sequences while `num_waiting` requests wait."""
    rng = random.Random(seed)
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=2 * WAITING_STEPS)
    names = [str(number) for number in range(NUM_RUNNING + num_waiting)]
    for name, prompt in zip(names, random_prompts(rng, [BATCH_TOKENS] * len(names)), strict=True):
        engine.add_request(name, prompt, params)
    started: set[str] = set()
    while len(started) < NUM_RUNNING:
        started.update(engine.step().request_ids)
    begin = time.perf_counter()
    for _ in range(WAITING_STEPS):
        engine.step()
    elapsed = time.perf_counter() - begin
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting) == (NUM_RUNNING, num_waiting)
    for name in names:
        engine.abort(name)
    engine.drain()
    return elapsed / WAITING_STEPS * 1e3


def rows_of(curve: str, axis: str, unit: str, found: dict[int, Figures]) -> list[dict[str, Any]]:
    rows = []
    for x, figures in found.items():
        row = {"curve": curve, "axis": axis, "x": x, "unit": unit}
        rows.append(row | {name: round(statistics.median(values), 2) for name, values in figures.items()})
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default="openvino,llamacpp")
    parser.add_argument("--curves", default="batch,context,waiting")
    parser.add_argument("--precision", choices=["fp32", "int8"], default="fp32")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--results", type=Path, default=report.RESULTS)
    args = parser.parse_args(argv)
    peers, wanted = args.peers.split(","), args.curves.split(",")
    if unknown := (set(peers) - set(KNOWN_PEERS)) | (set(wanted) - {"batch", "context", "waiting"}):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    rows = []
    if "waiting" in wanted:
        found = waiting_points(args.precision, args.model, args.threads, args.rounds)
        rows += rows_of("waiting", "waiting requests", "ms a step, 16 sequences", found)
    versions = {}
    if {"batch", "context"} & set(wanted):
        with running(["nanoserve", *peers], args.precision, args.model, args.threads) as engines:
            if "batch" in wanted:
                found = alternate(engines, BATCHES, args.rounds, batch_point)
                rows += rows_of("batch", "sequences", "tokens per second", found)
            if "context" in wanted:
                found = alternate(engines, CONTEXTS, args.rounds, context_point)
                rows += rows_of("context", "tokens of context", "ms a step, 1 sequence", found)
            versions = {name: engine.version for name, engine in engines.items()}
    about = {"precision": args.precision, "threads": args.threads, "rounds": args.rounds, "versions": versions}
    head = report.header(argv, "benchmarks.curves", **about)
    print(report.markdown(head, rows))
    file = report.save(args.results, f"curves-{args.precision}-{'-'.join(wanted)}", head, rows)
    report.plot("curves", file.with_suffix(".svg"), [file])


if __name__ == "__main__":
    main()
