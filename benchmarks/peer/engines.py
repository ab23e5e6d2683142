"""Engines that run beside each other and take turns: this one and its peers, each behind the same small interface."""

import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from benchmarks.peer import setup as peer_setup
from engine.hub import resolve_model

WORKER = Path(__file__).with_name("worker.py")
KNOWN_PEERS = ("openvino", "openvino-f32", "vllm", "llamacpp", "transformers")
"""`openvino` computes as it likes: in bfloat16 where the CPU has that, whatever the model's type. `openvino-f32` is
told to keep to float32."""


MAX_TOKEN_ID = 10_000
MAX_MODEL_LEN = 8192
MAX_NUM_SEQS = 128


class Rates(NamedTuple):
    """Tokens per second."""

    prefill: float
    decode: float


class PeerEngine(Protocol):
    name: str
    version: str

    def rates(self, batch: int, prompt: int, out: int, seed: int) -> Rates:
        """`batch` prompts of `prompt` tokens, `out` tokens each, greedy. Prefill is the time of as many prompts with
        one token out; decode is the other tokens over the rest of the whole run's time."""

    def seconds(self, prompts: list[list[int]], outs: list[int]) -> float | None:
        """Time for the prompts, all submitted at once; None if the engine has no way to take them."""

    def close(self) -> None: ...


def random_prompts(rng: random.Random, lengths: Sequence[int]) -> list[list[int]]:
    return [[rng.randint(3, MAX_TOKEN_ID) for _ in range(length)] for length in lengths]


class Worker:
    """An engine in a process of its own; see `worker.py`. It is stopped by a signal while others have their turn,
    since some engines' threads spin when there is nothing to do."""

    def __init__(self, name: str, python: Path, model: Path, threads: int, settings: dict[str, Any]) -> None:
        self.name, kind = name, name.partition("-")[0]
        command = [str(python), str(WORKER), kind, str(model), "--threads", str(threads)]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the worker
        self._process = subprocess.Popen(
            [*command, "--settings", json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=WORKER.parents[2],
            env=worker_environment(kind),
            start_new_session=True,
        )
        try:
            self.version = str(self._read()["ready"])
        except BaseException:
            self._signal(signal.SIGKILL)
            raise
        self._signal(signal.SIGSTOP)

    def rates(self, batch: int, prompt: int, out: int, seed: int) -> Rates:
        rng = random.Random(seed)
        with self._turn():
            prefill = self._timed(random_prompts(rng, [prompt] * batch), [1] * batch)
            whole = self._timed(random_prompts(rng, [prompt] * batch), [out] * batch)
        return Rates(prompt * batch / prefill, (out - 1) * batch / (whole - prefill))

    def seconds(self, prompts: list[list[int]], outs: list[int]) -> float | None:
        with self._turn():
            return self._timed(prompts, outs)

    def close(self) -> None:
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        self._timed([[1] * 16], [4])  # awake, and its code and weights in reach again
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def _timed(self, prompts: list[list[int]], outs: list[int]) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "outs": outs}) + "\n")
        self._process.stdin.flush()
        return float(self._read()["seconds"])

    def _signal(self, number: signal.Signals) -> None:
        """To the worker and the processes that it started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise RuntimeError(f"{self.name} ended:\n{self._log.read()[-4000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def worker_environment(name: str) -> dict[str, str]:
    environment = dict(os.environ) | {"HF_HUB_OFFLINE": "1"}
    if name == "nanoserve":
        environment["PYTHONPATH"] = str(WORKER.parents[2])
    if name == "vllm":  # by default it keeps a core free for its front end
        environment |= {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
    return environment


@dataclass
class LlamaBench:
    """llama.cpp by its own `llama-batched-bench`, which computes no samples; it has no mixed workload."""

    programs: Path
    model: Path
    threads: int
    name: str = "llamacpp"
    version: str = peer_setup.LLAMACPP_SOURCE.replace("llama-cpp-python==", "llama.cpp of llama-cpp-python ")

    def rates(self, batch: int, prompt: int, out: int, seed: int) -> Rates:
        command = [str(self.programs / "llama-batched-bench"), "-m", str(self.model), "-npl", str(batch)]
        command += ["-npp", str(prompt), "-ntg", str(out), "-c", str(batch * (prompt + out) + 64)]
        command += ["-t", str(self.threads), "-tb", str(self.threads), "--output-format", "jsonl"]
        for _ in range(3):  # it sometimes ends before its log is written, and the figures with it
            done = subprocess.run(command, capture_output=True, text=True)
            if (found := re.search(r'^\{.*"speed_tg".*\}', done.stdout, re.MULTILINE)) is not None:
                figures = json.loads(found.group())
                return Rates(float(figures["speed_pp"]), float(figures["speed_tg"]))
        raise RuntimeError(f"llama-batched-bench gave no figures:\n{done.stderr[-2000:]}")

    def seconds(self, prompts: list[list[int]], outs: list[int]) -> float | None:
        return None

    def close(self) -> None: ...


def start(name: str, precision: str, model: str, threads: int) -> PeerEngine:
    """`nanoserve` or one of `KNOWN_PEERS`, set up if it is not yet, with its weights loaded."""
    own = Path(sys.executable)
    if name == "nanoserve":
        limits = {"max_num_seqs": MAX_NUM_SEQS, "max_model_len": MAX_MODEL_LEN}
        return Worker(name, own, resolve_model(model), threads, nanoserve_settings(precision) | limits)
    if name == "llamacpp":
        programs = peer_setup.llamacpp() / "bin"
        return LlamaBench(programs, peer_setup.llamacpp_model(model, precision), threads)
    if name.startswith("openvino"):
        settings = {"INFERENCE_PRECISION_HINT": "f32"} if name == "openvino-f32" else {}
        python = peer_setup.environment("openvino")
        return Worker(name, python, peer_setup.openvino_model(model, precision), threads, settings)
    folder = peer_setup.hf_model(model)
    if name == "transformers":
        return Worker(name, own, folder, threads, {})
    limits = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": MAX_NUM_SEQS}
    return Worker(name, peer_setup.environment(name), folder, threads, limits)


def nanoserve_settings(precision: str) -> dict[str, Any]:
    return {"quantization": "int8", "kv_cache_dtype": "int8"} if precision == "int8" else {"quantization": "none"}


@contextmanager
def running(names: Sequence[str], precision: str, model: str, threads: int) -> Iterator[dict[str, PeerEngine]]:
    """Engines by name; all are closed at the end."""
    engines: dict[str, PeerEngine] = {}
    try:
        for name in names:
            began = time.perf_counter()
            engines[name] = start(name, precision, model, threads)
            print(f"{name} is there after {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
        yield engines
    finally:
        for engine in engines.values():
            engine.close()


@contextmanager
def busy_neighbour(wanted: bool) -> Iterator[None]:
    """A process that computes all the time on one of the cores, if it is wanted."""
    if not wanted:
        yield
        return
    core = max(os.sched_getaffinity(0))
    spin = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    process = subprocess.Popen([sys.executable, "-c", spin])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def medians(rounds: dict[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
    """For each measure, the median of each engine's figures, and the median over the rounds of this engine's ratio to
    each other one. `rounds[engine]` has a dict of figures for each round."""
    ours = rounds["nanoserve"]
    rows = []
    for measure in ours[0]:
        row: dict[str, Any] = {"measure": measure}
        for name, figures in rounds.items():
            if measure in figures[0]:
                row[name] = round(statistics.median(figure[measure] for figure in figures), 1)
        for name, figures in rounds.items():
            if name != "nanoserve" and measure in figures[0]:
                pairs = zip(ours, figures, strict=True)
                row[f"ratio to {name}"] = round(statistics.median(a[measure] / b[measure] for a, b in pairs), 2)
        rows.append(row)
    return rows
