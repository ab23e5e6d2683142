"""From nothing running to the first token, with its parts: model and kernels in the cache, everything else cold.

    python -m benchmarks.startup [--rounds 3] [--precision fp32|int8]

offline: a new Python process that imports the engine, loads kernels, model and tokenizer, and makes a token.
served: `serve run app:build` to the first event of a streamed completion; the parts are read from the server's log.

Medians over the rounds, in seconds; each part counts from the end of the one before.
"""

import argparse
import asyncio
import json
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import report
from benchmarks.peer.engines import nanoserve_settings, worker_environment
from benchmarks.servers.client import stream, wait_until_served
from benchmarks.servers.processes import PORTS, START_S, command
from engine.config import DEFAULT_MODEL
from tests.live_server import stop

PROMPT = list(range(5, 21))

MILESTONES = {
    "serve's command line": "Running import path",
    "Ray": "Started a local Ray instance",
    "Serve": "Started Serve",
    "deploy": "replica to Deployment(name='engine'",
    "engine replica": "Engine ready",
}
"""Parts of a start, and what the log says when one is done."""


def offline_parts(settings: dict[str, Any]) -> dict[str, float]:
    words = [sys.executable, "-m", "benchmarks.startup_offline", repr(time.time()), json.dumps(settings)]
    done = subprocess.run(words, cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, text=True, check=True)
    marks: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return marks


def served_parts(words: Sequence[str]) -> dict[str, float]:
    begin = time.perf_counter()
    process = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        cwd=Path(__file__).parents[1],
        env=worker_environment("nanoserve") | {"RAY_USAGE_STATS_ENABLED": "0"},
        start_new_session=True,
    )
    times: dict[str, float] = {}
    lines: list[str] = []

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            for name, text in MILESTONES.items():
                if text in line:
                    times.setdefault(name, time.perf_counter() - begin)

    def check() -> None:
        if process.poll() is not None:
            raise RuntimeError("the server ended:\n" + "".join(lines[-40:]))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        model = wait_until_served(PORTS["nanoserve"], START_S, check)
        times["routes"] = time.perf_counter() - begin
        asked = time.perf_counter()
        first = asyncio.run(stream(PORTS["nanoserve"], model, PROMPT, 1)).first
        times["first token"] = asked + first - begin
    finally:
        stop(process)
    if missing := MILESTONES.keys() - times.keys():
        raise RuntimeError(f"the log does not say {', '.join(MILESTONES[name] for name in missing)}")
    order = sorted(times.items(), key=lambda item: item[1])
    return {name: end - before for (name, end), (_, before) in zip(order, [("", 0.0), *order], strict=False)}


def rows_of(kind: str, rounds: Sequence[dict[str, float]]) -> list[dict[str, Any]]:
    rows = [
        {"start": kind, "part": part, "seconds": round(statistics.median(parts[part] for parts in rounds), 2)}
        for part in rounds[0]
    ]
    total = statistics.median(sum(parts.values()) for parts in rounds)
    return [*rows, {"start": kind, "part": "all", "seconds": round(total, 2)}]


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", choices=["fp32", "int8"], default="fp32")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=report.RESULTS)
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # end the server too
    settings = nanoserve_settings(args.precision) | {"model": args.model}
    words = command("nanoserve", args.precision, args.model, 0)
    offline = [offline_parts(settings) for _ in range(args.rounds)]
    served = [served_parts(words) for _ in range(args.rounds)]
    rows = rows_of("offline", offline) + rows_of("served", served)
    head = report.header(argv, "benchmarks.startup", precision=args.precision, rounds=args.rounds)
    print(report.markdown(head, rows))
    report.save(args.results, f"startup-{args.precision}", head, rows, rounds={"offline": offline, "served": served})


if __name__ == "__main__":
    main()
