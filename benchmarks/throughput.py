"""Offline throughput: tokens per second of `LLM.generate` on random prompts, with the prefix cache off.

    python -m benchmarks.throughput [--model M] [--workload fixed|mixed|nano|all] [--threads N] [--json]

fixed: B prompts of 128 tokens, 128 tokens out, greedy, no EOS; B = 1, 4, 16, 32. The same number of prompts with one
    token out is the prefill time; decode speed is the other B x 127 tokens over the rest of the whole run's time.
mixed: 32 prompts of 25-256 tokens, 25-256 tokens out, greedy, all at once.
nano: the shape of nano-vllm's bench.py scaled to a small CPU: 64 prompts of 25-256 tokens, 25-256 tokens out,
    temperature 0.6, max_num_seqs 64. Also says how full the KV blocks are while most sequences run.

With --json, one object a line: first what was measured on, then one for each measurement.
"""

import argparse
import datetime
import json
import platform
import random
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from engine.config import DEFAULT_MODEL, EngineConfig
from engine.engine import Engine
from engine.llm import LLM
from engine.outputs import StepOutput
from engine.sampling_params import SamplingParams
from engine.text.tokenizer import load_tokenizer

FIXED_BATCHES = (1, 4, 16, 32)
FIXED_TOKENS = 128
DRAWN_TOKENS = (25, 256)
MAX_TOKEN_ID = 10_000
MAX_NUM_SEQS = 64


class PoolSample(NamedTuple):
    """The KV pool after a step."""

    num_running: int
    slots_used: int
    slots_held: int


class SampledEngine(Engine):
    """An engine that notes the state of its KV pool after each step, while `samples` is a list."""

    samples: list[PoolSample] | None = None

    def step(self) -> StepOutput:
        output = super().step()
        if self.samples is not None:
            stats = self.stats()
            held = stats.live_blocks * self.info.block_size
            self.samples.append(PoolSample(stats.num_running, stats.slots_used, held))
        return output


@dataclass(frozen=True)
class Bench:
    llm: LLM
    engine: SampledEngine

    @classmethod
    def of(cls, model: str, threads: int, dtype: str) -> "Bench":
        config = EngineConfig.from_kwargs(
            model=model, dtype=dtype, num_threads=threads, max_num_seqs=MAX_NUM_SEQS, enable_prefix_caching=False
        )
        engine = SampledEngine.from_config(config)
        assert engine.info.model_path is not None
        bench = cls(LLM.from_engine(engine, load_tokenizer(engine.info.model_path)), engine)
        rng = random.Random(0)
        bench.seconds([bench.prompt(rng, 16)] * 2, [4, 4])  # warm up
        return bench

    def prompt(self, rng: random.Random, length: int) -> list[int]:
        highest = min(MAX_TOKEN_ID, self.engine.info.vocab_size - 1)
        return [rng.randint(0, highest) for _ in range(length)]

    def seconds(self, prompts: list[list[int]], outs: Sequence[int], temperature: float = 0.0) -> float:
        """Time of one `generate` with `outs[i]` tokens for `prompts[i]`."""
        params = [SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=n) for n in outs]
        start = time.perf_counter()
        results = self.llm.generate(prompts, params, use_tqdm=False)
        elapsed = time.perf_counter() - start
        made = [len(result.outputs[0].token_ids) for result in results]
        if made != list(outs):
            raise RuntimeError("the engine made fewer tokens than asked for: the figure would be wrong")
        return elapsed


def fixed(bench: Bench) -> Iterator[dict[str, Any]]:
    rng, n = random.Random(0), FIXED_TOKENS
    for batch in FIXED_BATCHES:
        prefill = bench.seconds([bench.prompt(rng, n) for _ in range(batch)], [1] * batch)
        whole = bench.seconds([bench.prompt(rng, n) for _ in range(batch)], [n] * batch)
        yield {
            "workload": "fixed",
            "batch": batch,
            "prefill_tok_s": round(n * batch / prefill, 1),
            "decode_tok_s": round((n - 1) * batch / (whole - prefill), 1),
            "out_tok_s": round(n * batch / whole, 1),
        }


def mixed(bench: Bench) -> Iterator[dict[str, Any]]:
    prompts, outs = drawn_lengths(bench, 32)
    elapsed = bench.seconds(prompts, outs)
    yield {"workload": "mixed", "batch": 32, "out_tokens": sum(outs), "out_tok_s": round(sum(outs) / elapsed, 1)}


def nano(bench: Bench) -> Iterator[dict[str, Any]]:
    prompts, outs = drawn_lengths(bench, MAX_NUM_SEQS)
    samples: list[PoolSample] = []
    bench.engine.samples = samples
    preemptions = bench.engine.stats().preemptions
    elapsed = bench.seconds(prompts, outs, temperature=0.6)
    bench.engine.samples = None
    lowest, mean, steps = fill_at_saturation(samples)
    yield {
        "workload": "nano",
        "batch": MAX_NUM_SEQS,
        "in_tokens": sum(map(len, prompts)),
        "out_tokens": sum(outs),
        "out_tok_s": round(sum(outs) / elapsed, 1),
        "block_size": bench.engine.info.block_size,
        "running_max": max(sample.num_running for sample in samples),
        "saturated_steps": steps,
        "slot_fill_min": round(lowest, 4),
        "slot_fill_mean": round(mean, 4),
        "preemptions": bench.engine.stats().preemptions - preemptions,
    }


def drawn_lengths(bench: Bench, count: int) -> tuple[list[list[int]], list[int]]:
    """Prompts of random lengths in `DRAWN_TOKENS`, and as many output lengths from the same range."""
    rng = random.Random(0)
    prompts = [bench.prompt(rng, rng.randint(*DRAWN_TOKENS)) for _ in range(count)]
    return prompts, [rng.randint(*DRAWN_TOKENS) for _ in range(count)]


def fill_at_saturation(samples: Sequence[PoolSample]) -> tuple[float, float, int]:
    """Share of the slots in allocated blocks that hold a token: lowest and mean over the steps with the most
    sequences running, and how many steps those are."""
    most = max(sample.num_running for sample in samples)
    fills = [sample.slots_used / sample.slots_held for sample in samples if sample.num_running == most]
    return min(fills), sum(fills) / len(fills), len(fills)


WORKLOADS = {"fixed": fixed, "mixed": mixed, "nano": nano}


def machine() -> dict[str, Any]:
    """What figures are measured on."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": _cpu_model(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": _commit(),
    }


def header(engine: Engine, model: str) -> dict[str, Any]:
    return machine() | {
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if engine.info.device.startswith("cuda") else engine.info.device,
        "model": Path(model).name,
        "dtype": engine.info.dtype,
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _commit() -> str | None:
    """The commit of this source tree, with `+` if files of it have changed; None where there is none."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        commit = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        changes = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit.stdout.strip() + ("+" if changes.stdout else "")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help=f"as the engine takes it (default {DEFAULT_MODEL})")
    parser.add_argument("--workload", choices=[*WORKLOADS, "all"], default="all")
    parser.add_argument("--threads", type=int, default=0, help="of the CPU; 0 is one for each core")
    parser.add_argument("--dtype", default="auto", help="as the engine takes it; float32 is exact on a CPU")
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    args = parser.parse_args(argv)

    bench = Bench.of(args.model, args.threads, args.dtype)
    names = list(WORKLOADS) if args.workload == "all" else [args.workload]
    _show(header(bench.engine, args.model), args.json)
    for name in names:
        for figures in WORKLOADS[name](bench):
            _show({"engine": "nanoserve", **figures}, args.json)
    bench.llm.close()


def _show(figures: dict[str, Any], as_json: bool) -> None:
    text = json.dumps(figures) if as_json else "  ".join(f"{key}={value}" for key, value in figures.items())
    print(text, flush=True)


if __name__ == "__main__":
    main()
