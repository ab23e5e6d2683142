"""Host time of a decode step: everything but the model.

    python -m benchmarks.host_overhead [--sequences 1,32,256,1024] [--steps N] [--overlap] [--swap] [--json]

Drives the public `Engine.step()` with a stand-in for the device: forward and sampling are left out, while planning,
block growth, the plan's arrays as tensors, the differences to the device's tables, stop checks, hashing and output
messages all happen. Sequences have prompts of 100-1024 random tokens and end at 1024 more, as in nano-vllm's benchmark.

parts: microseconds a step in `schedule` (which planned it), `launch` (the runner's own host work) and `commit` (stop
checks, hashing, output); what is left is the engine's loop.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from engine.device.step_inputs import DeviceRows
from engine.engine import Engine
from engine.runner import RunnerInfo, SwapInfo
from engine.sampling_params import SamplingParams
from engine.step import StepPlan, StepResult

BLOCK_SIZE = 16
MAX_MODEL_LEN = 2304
BUDGET = 16_384


class HostOnlyRunner:
    """Does the host's half of a launch and samples the same token for ever."""

    def __init__(self, num_sequences: int, swap: bool) -> None:
        blocks = num_sequences * -(-MAX_MODEL_LEN // BLOCK_SIZE)
        self.info = RunnerInfo(
            num_blocks=blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=num_sequences,
            max_num_batched_tokens=BUDGET,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=50_000,
            eos_token_ids=(2,),
            device="stand-in",
            dtype="none",
            swap=SwapInfo(blocks, 1 << 20, seconds_per_block=1e-4, seconds_per_token=1e-4) if swap else None,
        )
        self._rows = DeviceRows(self.info, torch.device("cpu"))
        self._tokens = np.full(num_sequences, 5)

    def launch(self, plan: StepPlan) -> int:
        self._rows.inputs(plan)
        return len(plan.sample)

    def collect(self, ticket: int) -> StepResult:
        return StepResult(self._tokens[:ticket])

    def close(self) -> None:
        pass


def measure(num_sequences: int, steps: int, overlap: bool, swap: bool = False) -> dict[str, Any]:
    """Median time of a decode step with `num_sequences` running, by part."""
    rng = random.Random(0)
    runner = HostOnlyRunner(num_sequences, swap)
    engine = Engine(runner, async_scheduling=overlap)
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=1024)
    for i in range(num_sequences):
        engine.add_request(str(i), [rng.randint(0, 10_000) for _ in range(rng.randint(100, 1024))], params)
    decoding: set[str] = set()
    while len(decoding) < num_sequences:
        decoding.update(engine.step().request_ids)
    parts: dict[str, list[float]] = {}
    _time(engine.scheduler, "schedule", parts)
    _time(engine.scheduler, "commit", parts)
    _time(runner, "launch", parts)
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start)
    return {
        "sequences": num_sequences,
        "us_per_step": round(statistics.fmean(times) * 1e6, 1),
        "us_median": round(statistics.median(times) * 1e6, 1),
        "parts": {name: round(statistics.fmean(values) * 1e6, 1) for name, values in parts.items()},
    }


def _time(owner: Any, name: str, parts: dict[str, list[float]]) -> None:
    """Replace a method by one that notes how long it takes."""
    method: Callable[..., Any] = getattr(owner, name)
    values = parts.setdefault(name, [])

    def timed(*args: Any) -> Any:
        start = time.perf_counter()
        result = method(*args)
        values.append(time.perf_counter() - start)
        return result

    setattr(owner, name, timed)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", default="1,32,256,1024", help="numbers of running sequences, by commas")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--overlap", action="store_true", help="with two steps in flight")
    parser.add_argument("--swap", action="store_true", help="with swap space, which nobody needs here")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    rows = [measure(int(n), args.steps, args.overlap, args.swap) for n in args.sequences.split(",")]
    if args.json:
        print(json.dumps({"overlap": args.overlap, "rows": rows}))
        return
    for row in rows:
        print(f"{row['sequences']:5d} sequences  {row['us_per_step']:7.1f} us a step  {row['parts']}")


if __name__ == "__main__":
    main()
