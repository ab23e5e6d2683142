"""What only a GPU can show, in under ten minutes, on one page: `make gpu-check`.

    python -m benchmarks.gpu_check [--out PAGE] [--minutes 9.5]

Runs tests/gpu, the kernels' times over their roofline (`benchmarks.kernels_gpu`), nano-vllm's benchmark on a model of
Qwen3-0.6B's shape (bfloat16 and fp8 KV), and the same at a quarter of the size with one feature less at a time. Each
result is on the page as soon as it is known, so a run that is cut off keeps what it had; one that fails is named there
and the others go on. What pytest says of failures is in a file beside the page. Everything runs in processes of its
own: a crash ends one part, and no part's memory is another's. Needs torch, triton, transformers, safetensors, numpy and
pytest, and no network.

Exit code: 0 all well, 1 something failed, 2 no CUDA device.
"""

import argparse
import contextlib
import datetime
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"

Job = dict[str, Any]

FULL = {"requests": 256, "longest": 1024}
QUARTER = {"requests": 128, "longest": 512}
LOADS: dict[str, Job] = {
    "bfloat16 KV": FULL,
    "fp8 KV": {**FULL, "settings": {"kv_cache_dtype": "fp8"}},
}
ABLATION: dict[str, Job] = {
    "everything on": QUARTER,
    "no CUDA graphs": {**QUARTER, "settings": {"enforce_eager": True}},
    "no overlap": {**QUARTER, "settings": {"async_scheduling": False}},
    "torch.compile": {**QUARTER, "settings": {"compilation": True}},
    "no fused elementwise kernels": {**QUARTER, "references": True},
}
LOAD_COLUMNS = ("out_tok_s", "floor_tok_s", "share_of_floor", "seconds", "batch1_step_us", "batch1_over_weights",
                "copy_gb_s", "kv_blocks", "preemptions", "start_s")  # fmt: skip
KERNEL_COLUMNS = ("name", "shape", "us", "floor_us", "share", "gb_per_s", "tflop_per_s")


class Page:
    """A page of Markdown that is written line by line. end: seconds on `time.monotonic` when the run must be over."""

    def __init__(self, path: Path, end: float) -> None:
        self.path = path
        self.end = end
        self.failures: list[str] = []
        path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, *lines: str) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)
        print(*lines, sep="\n", flush=True)

    def row(self, *cells: object) -> None:
        self.write("| " + " | ".join(str(cell) for cell in cells) + " |")

    def header(self, *cells: str) -> None:
        self.row(*cells)
        self.write("|" + "---|" * len(cells))

    def seconds_left(self, at_most: float) -> float:
        return min(at_most, self.end - time.monotonic())

    def attempt(self, title: str, run: Callable[[], None]) -> None:
        """Write what `run` writes; what goes wrong in it is written too, and is no reason to stop."""
        if self.seconds_left(1) <= 0:
            self.failures.append(title)
            self.write("", f"**{title}: no time left.**")
            return
        try:
            run()
        except Exception as error:
            self.failures.append(title)
            self.write("", f"**{title} failed: {type(error).__name__}: {' '.join(str(error).split())[-600:]}**", "")


def describe(page: Page) -> None:
    properties = torch.cuda.get_device_properties(0)
    with contextlib.suppress(ImportError):
        import triton

        page.write(f"triton {triton.__version__}, ")
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    page.write(
        f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
        f"{properties.total_memory / 2**30:.1f} GiB, torch {torch.__version__}, commit {commit or 'unknown'}"
    )


def run_tests(page: Page, title: str, parts: Sequence[Sequence[str]], seconds: float) -> None:
    """parts: arguments of pytest, each for a process of its own, all at once. Names of failed tests go on the page."""
    page.write("", f"## {title}", "")
    told = page.path.with_suffix(".tests.txt")
    counts: Counter[str] = Counter()
    lock = threading.Lock()

    def run(arguments: Sequence[str]) -> None:
        command = [sys.executable, "-m", "pytest", "--confcutdir=tests/gpu", "-v", "--tb=short", "-p",
                   "no:cacheprovider", *arguments]  # fmt: skip
        for line in stream(command, seconds):
            with lock, told.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
                if match := _TEST.match(line):
                    counts[match[2]] += 1
                    if match[2] in ("FAILED", "ERROR"):
                        page.write(f"- {match[2]} {match[1]}")

    errors = []
    with ThreadPoolExecutor(len(parts)) as pool:
        for part in [pool.submit(run, arguments) for arguments in parts]:
            try:
                part.result()
            except Exception as error:
                errors.append(str(error))
    page.write(", ".join(f"{count} {word.lower()}" for word, count in sorted(counts.items())) or "no test ran")
    if errors:
        raise RuntimeError("; ".join(errors))


_TEST = re.compile(r"(\S+::.+?) (PASSED|FAILED|SKIPPED|ERROR)")

KERNEL_TESTS = [["tests/gpu/test_kernels.py", "-k", f"seed{seed}"] for seed in range(4)]
KERNEL_TESTS.append(["tests/gpu/test_kernels.py", "-k", "not seed"])
STEP_TESTS = [["tests/gpu/test_steps.py"]]


def stream(command: Sequence[str], seconds: float) -> Iterator[str]:
    """Lines of a command's output as they come. Raises `RuntimeError` if it fails, or is ended for want of time."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as stderr:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, text=True)
        late = threading.Event()

        def end() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(max(seconds, 0), end)
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                yield line.rstrip("\n")
            process.wait()
        finally:
            timer.cancel()
            process.kill()
            process.wait()
        stderr.seek(0)
        said = " ".join(stderr.read()[-2000:].split())[-300:]
    if late.is_set():
        raise RuntimeError(f"ended after {seconds:.0f} s: {said}")
    if process.returncode:
        raise RuntimeError(f"it ended with {process.returncode}: {said}")


def run_kernels(page: Page, seconds: float) -> None:
    page.write("", "## Kernels over their roofline", "")
    page.header(*KERNEL_COLUMNS)
    seconds = page.seconds_left(seconds)
    command = [sys.executable, "-m", "benchmarks.kernels_gpu", "--budget", str(0.8 * seconds)]
    failed = []
    for line in stream(command, seconds):
        row = json.loads(line)
        page.row(*(_short(row.get(column)) for column in KERNEL_COLUMNS))
        if "error" in row:
            failed.append(f"{row['name']} {row['shape']}: {row['error']}")
    if failed:
        raise RuntimeError("; ".join(failed))


def run_loads(page: Page, title: str, jobs: dict[str, Job], seconds: float) -> None:
    page.write("", f"## {title}", "")
    page.header("", *LOAD_COLUMNS)
    for name, job in jobs.items():
        page.attempt(f"{title}, {name}", partial(_run_load, page, name, job, seconds))


def _run_load(page: Page, name: str, job: Job, seconds: float) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_load", json.dumps(job)]
    *_, last = stream(command, page.seconds_left(seconds))
    figures = json.loads(last)
    page.row(name, *(_short(figures[column]) for column in LOAD_COLUMNS))


def _short(value: object) -> object:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else value


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    today = datetime.date.today().isoformat()
    parser.add_argument("--out", type=Path, default=RESULTS / f"{today}-gpu-check.md", help="page to append to")
    parser.add_argument("--minutes", type=float, default=9.5, help="time for all of it")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("gpu-check: no CUDA device that torch can use, so nothing was run", file=sys.stderr)
        return 2
    args.out.with_suffix(".tests.txt").unlink(missing_ok=True)
    page = Page(args.out, time.monotonic() + 60 * args.minutes)
    page.write(f"# GPU check, {datetime.datetime.now().isoformat(timespec='minutes')}", "")
    page.attempt("device", lambda: describe(page))
    kernels, steps = "tests/gpu: kernels", "tests/gpu: steps"
    page.attempt(kernels, lambda: run_tests(page, kernels, KERNEL_TESTS, page.seconds_left(120)))
    page.attempt(steps, lambda: run_tests(page, steps, STEP_TESTS, page.seconds_left(150)))
    run_loads(page, "256 requests, 100-1024 tokens in and out", LOADS, 100)
    page.attempt("kernels", lambda: run_kernels(page, 90))
    run_loads(page, "One feature less: 128 requests, 100-512 tokens", ABLATION, 60)
    failed = ", ".join(page.failures)
    page.write("", f"Failed: {failed}." if failed else "All of it ran.")
    return 1 if page.failures else 0


if __name__ == "__main__":
    sys.exit(main())
