"""What tensor parallelism costs: the way of the plan, the ranks' talk, and the speed beside one rank on the same cores.

    python -m benchmarks.tensor_parallel [--parts plan,sums,decode] [--results FOLDER]

plan: out and the result back, of a decode step of 8 sequences, to 2 and 4 ranks and from rank 0, by our ring, by TCP,
by gloo (the same bytes, and objects as torch pickles them) and by plain Ray actor calls; three rounds in alternation.
sums: `benchmarks.ranks.rank_sums`, for 2, 3 and 4 ranks.
decode: steps through `Engine` of random float32 weights in the shape of SmolLM2-135M, but with 8 heads and 4 KV heads,
which two can share; with one rank in the process and two as shards on the same cores; medians. collectives_ms is what
rank 0 spends in its group's collectives, waiting for the other included.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.util.placement_group import placement_group, remove_placement_group

from app.resources import shard_bundle
from app.shard import Rank, load_rank
from app.shards import ShardedRunner, ShardGroup
from benchmarks.common.report import RESULTS, header, markdown, save
from benchmarks.ranks import plan_channel, rank_sums
from engine.config import EngineConfig
from engine.engine import Engine
from engine.sampling_params import SamplingParams
from engine.step import StepPlan, StepResult

SEQUENCES = 8
PROMPT_TOKENS = 32
TOKENS = 128
BATCHES = (1, 4, 16)
ROUNDS = 2


SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100_000,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class TimedRank:
    """A rank that notes what its decode steps take, and its collectives of that; rank 0 writes it to `file`."""

    def __init__(self, file: Path, config: EngineConfig, rank: Rank, store: Any) -> None:
        from engine.parallel.group import ParallelGroup

        self._file = file if rank.index == 0 else None
        self._in_collectives = 0.0
        self._steps: list[tuple[int, float, float]] = []  # sequences, ms in all, ms in collectives
        wait = ParallelGroup._wait

        def timed(group: ParallelGroup, *args: Any) -> Any:
            began = time.perf_counter()
            result = wait(group, *args)
            self._in_collectives += time.perf_counter() - began
            return result

        ParallelGroup._wait = timed  # type: ignore[assignment, method-assign]
        self._runner = load_rank(config, rank, store)
        self.info = self._runner.info

    def launch(self, plan: StepPlan) -> Any:
        began, before = time.perf_counter(), self._in_collectives
        return self._runner.launch(plan), plan, began, before

    def collect(self, ticket: Any) -> StepResult:
        inner, plan, began, before = ticket
        result = self._runner.collect(inner)
        if plan.num_tokens == len(plan.rows):
            took, in_collectives = time.perf_counter() - began, self._in_collectives - before
            self._steps.append((len(plan.rows), 1e3 * took, 1e3 * in_collectives))
        return result

    def leave(self) -> bool:
        return self._runner.leave()

    def meet_again(self, word: str) -> list[str]:
        return self._runner.meet_again(word)

    def close(self) -> None:
        self._runner.close()
        if self._file is not None:
            self._file.write_text(json.dumps(self._steps))


def decode_ms(engine: Engine, batch: int) -> list[float]:
    """Milliseconds of the steps in which `batch` sequences decode."""
    rng = np.random.default_rng(batch)
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    for i in range(batch):
        engine.add_request(f"{i}", rng.integers(1000, 10_000, PROMPT_TOKENS).tolist(), params)
    took = []
    while engine.has_work():
        began = time.perf_counter()
        output = engine.step()
        took.append(1e3 * (time.perf_counter() - began))
        if output.finished:
            break
    while engine.has_work():
        engine.step()
    return took[len(took) - TOKENS // 2 :]


def measure_decode(folder: Path) -> Iterator[dict[str, Any]]:
    (folder / "config.json").write_text(json.dumps(SHAPE))
    settings: dict[str, Any] = {
        "model": str(folder), "load_format": "dummy", "dtype": "float32", "device": "cpu", "max_model_len": 512,
        "num_gpu_blocks_override": 600, "enable_prefix_caching": False,
    }  # fmt: skip
    bundles = placement_group([shard_bundle(0)] * 2)
    config = EngineConfig(**settings, tensor_parallel_size=2)
    file = folder / "steps.json"
    runner = ShardedRunner(ShardGroup(config, (bundles, 0), partial(TimedRank, file)), config.shard_timeout_s)
    engines = {1: Engine.from_config(EngineConfig(**settings)), 2: Engine(runner)}
    times: dict[tuple[int, int], list[float]] = {}
    for i in range(ROUNDS + 1):
        for batch in BATCHES:
            for ranks, engine in engines.items():
                took = decode_ms(engine, batch)
                if i:
                    times.setdefault((ranks, batch), []).extend(took)
    for engine in engines.values():
        engine.close()
    remove_placement_group(bundles)
    of_rank = json.loads(file.read_text())
    for batch in BATCHES:
        for ranks in engines:
            step_ms = float(np.median(times[ranks, batch]))
            row: dict[str, Any] = {"ranks": ranks, "sequences": batch, "step_ms": round(step_ms, 2)}
            row["tokens_per_s"] = round(1000 * batch / step_ms)
            if ranks > 1:
                steps = np.array([step[1:] for step in of_rank if step[0] == batch])
                rank_ms, collectives_ms = np.median(steps, axis=0).tolist()
                row |= {"rank_0_ms": round(rank_ms, 2), "collectives_ms": round(collectives_ms, 2)}
                row["of_step"] = round(collectives_ms / step_ms, 2)
            yield row


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="plan,sums,decode")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        for part in args.parts.split(","):
            if part == "plan":
                rows = [row for ranks in (2, 4) for row in plan_channel.measure(ranks, SEQUENCES)]
            elif part == "sums":
                rows = [row for ranks in (2, 3, 4) for row in rank_sums.measure(ranks)]
            else:
                with tempfile.TemporaryDirectory() as folder:
                    rows = list(measure_decode(Path(folder)))
            head = header(argv, "benchmarks.tensor_parallel")
            print(markdown(head, rows), flush=True)
            save(args.results, f"tensor-parallel-{part}", head, rows)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
