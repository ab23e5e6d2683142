"""This engine beside its peers, on the same weights, in alternation.

    python -m benchmarks.peers [--peers openvino,transformers] [--precision fp32|int8] [--rounds 3] [--json]

fixed: B prompts of 128 tokens, 128 tokens out, greedy; B = 1, 4, 16, 32. Prefill is the time of as many prompts with
    one token out; decode speed is the other tokens over the rest of the whole run's time.
mixed: 32 prompts of 25-256 tokens, 25-256 tokens out, all at once.

Each round runs every measurement on every engine in turn, so that a slow minute of the machine meets all of them; the
figures are medians over the rounds, and ratios are medians of each round's ratio. Each peer gets an environment of its
own in the cache folder, set up on first use. With int8, a peer without int8 runs in float32.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.throughput import machine
from engine.config import DEFAULT_MODEL
from engine.export import export_hf_folder
from engine.hub import resolve_model
from kernels.cache_dir import cache_dir

BATCHES = (1, 4, 16, 32)
WORKER = Path(__file__).with_name("peer_worker.py")

PACKAGES = {
    "openvino": ("torch==2.13.0", "openvino-genai", "optimum-intel[openvino]"),
    "transformers": (),  # the project's own environment has it
}


class Worker:
    """A running engine; see `peer_worker.py`."""

    def __init__(self, name: str, python: Path, model: Path, threads: int, settings: dict[str, Any]) -> None:
        self.name = name
        command = [str(python), str(WORKER), name, str(model), "--threads", str(threads)]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the worker
        self._process = subprocess.Popen(
            [*command, "--settings", json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=WORKER.parents[1],
            env={**os.environ, "PYTHONPATH": str(WORKER.parents[1])} if name == "nanoserve" else None,
        )
        self.version = str(self._read()["ready"])

    def seconds(self, prompts: list[list[int]], outs: list[int]) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "outs": outs}) + "\n")
        self._process.stdin.flush()
        return float(self._read()["seconds"])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise RuntimeError(f"{self.name} ended:\n{self._log.read()[-2000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def start(name: str, precision: str, model: str, threads: int) -> Worker:
    own = Path(sys.executable)
    if name == "nanoserve":
        settings = {"quantization": "int8"} if precision == "int8" else {"dtype": "float32"}
        return Worker(name, own, weights(model), threads, settings)
    if name == "transformers":
        return Worker(name, own, weights(model), threads, {})
    python = environment(name)
    return Worker(name, python, openvino_model(python, model, precision), threads, {})


def weights(model: str) -> Path:
    """The model as a folder that every peer reads, float32."""
    source = resolve_model(model)
    if source.is_dir():
        return source
    folder = cache_dir() / "peers" / f"{source.stem}-hf"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        export_hf_folder(source, folder)
    return folder


def environment(name: str) -> Path:
    """The Python of a peer's own environment."""
    folder = cache_dir() / "peers" / name
    python = folder / "bin" / "python"
    if not (folder / ".ready").exists():
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES[name]], check=True)
        # A torchvision that does not match this torch breaks the import of transformers; nothing here needs it.
        subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "--yes", "torchvision"], check=True)
        (folder / ".ready").touch()
    return python


def openvino_model(python: Path, model: str, precision: str) -> Path:
    source = weights(model)
    folder = cache_dir() / "peers" / f"{source.name}-openvino-{precision}"
    if not (folder / "openvino_model.xml").exists():
        command = [
            python.with_name("optimum-cli"),
            "export",
            "openvino",
            "--model",
            source,
            "--weight-format",
            precision,
        ]
        subprocess.run([*command, "--task", "text-generation-with-past", folder], check=True, stdout=subprocess.DEVNULL)
    return folder


def one_round(worker: Worker, seed: int) -> dict[str, float]:
    rng = random.Random(seed)

    def prompts(lengths: Sequence[int]) -> list[list[int]]:
        return [[rng.randint(3, 10_000) for _ in range(length)] for length in lengths]

    figures = {}
    for batch in BATCHES:
        prefill = worker.seconds(prompts([128] * batch), [1] * batch)
        whole = worker.seconds(prompts([128] * batch), [128] * batch)
        figures[f"prefill B={batch}"] = 128 * batch / prefill
        figures[f"decode B={batch}"] = 127 * batch / (whole - prefill)
    outs = [rng.randint(25, 256) for _ in range(32)]
    figures["mixed"] = sum(outs) / worker.seconds(prompts([rng.randint(25, 256) for _ in outs]), outs)
    return figures


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default="openvino,transformers")
    parser.add_argument("--precision", choices=["fp32", "int8"], default="fp32")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    names = ["nanoserve", *args.peers.split(",")]
    if unknown := set(names) - {"nanoserve", *PACKAGES}:
        parser.error(f"unknown peers {', '.join(sorted(unknown))}; known are {', '.join(PACKAGES)}")
    workers = {name: start(name, args.precision, args.model, args.threads) for name in names}
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for seed in range(args.rounds):
        for name, worker in workers.items():
            rounds[name].append(one_round(worker, seed))
    for worker in workers.values():
        worker.close()
    header = machine() | {"precision": args.precision, "threads": args.threads, "rounds": args.rounds}
    header["versions"] = {name: worker.version for name, worker in workers.items()}
    rows = []
    for key in rounds["nanoserve"][0]:
        row: dict[str, Any] = {"measure": key}
        for name in names:
            row[name] = round(statistics.median(figures[key] for figures in rounds[name]), 1)
        for name in names[1:]:
            pairs = zip(rounds["nanoserve"], rounds[name], strict=True)
            row[f"ratio to {name}"] = round(statistics.median(ours[key] / theirs[key] for ours, theirs in pairs), 2)
        rows.append(row)
    if args.json:
        print(json.dumps(header))
        for row in rows:
            print(json.dumps(row))
    else:
        print(table(header, rows))


def table(header: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: tokens per second, and this engine's ratio to each peer."""
    columns = list(rows[0])
    lines = [json.dumps(header), "", f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    lines += [f"| {' | '.join(str(row[column]) for column in columns)} |" for row in rows]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
