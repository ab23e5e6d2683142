"""What LoRA adapters cost: a batch in which no, some or all sequences have one of so many adapters, in alternation.

    python -m benchmarks.lora [--model M] [--batch 16] [--rank 16] [--tokens 96] [--repeat 3]

Random adapters of all seven projections. Prefill is one step a sequence of 128 tokens; decode is what follows. `not
enabled` is an engine that takes no adapters.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine.config import DEFAULT_MODEL
from engine.llm import LLM
from engine.lora.request import LoRARequest
from engine.runner import Runner
from engine.sampling_params import SamplingParams

PROMPT = 128


def write_adapter(folder: Path, runner: Any, rank: int, seed: int) -> LoRARequest:
    """A random adapter of every projection of the runner's model."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in runner.adapters.targets.items():
        shapes = {"A": (rank, module.in_features), "B": (sum(module.sizes), rank)}
        for which, shape in shapes.items():
            values = torch.randn(shape, generator=generator) * 0.01
            tensors[f"base_model.model.{name}.lora_{which}.weight"] = values
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return LoRARequest(folder.name, 1, str(folder))


def measure(llm: LLM, batch: int, tokens: int, adapters: list[LoRARequest | None]) -> tuple[float, float]:
    """(prefill, decode) tokens per second; the adapters go round among the sequences."""
    engine, rng = llm.engine, random.Random(time.time_ns())
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=tokens + 1)
    loaded = [None if request is None else engine.load_adapter(request) for request in adapters]
    for i in range(batch):
        prompt = [rng.randint(3, 10_000) for _ in range(PROMPT)]
        engine.add_request(str(i), prompt, params, adapter=loaded[i % len(loaded)])
    start, made = time.perf_counter(), 0
    while made < batch:  # the first token of each
        made += len(engine.step().token_ids)
    middle, extra = time.perf_counter(), made - batch
    while engine.has_work():
        engine.step()
    return batch * PROMPT / (middle - start), (batch * tokens - extra) / (time.perf_counter() - middle)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--quantization", default=None)
    options = parser.parse_args()
    settings: dict[str, Any] = {"model": options.model, "quantization": options.quantization}
    plain = LLM(**settings)
    llm = LLM(**settings, enable_lora=True, max_lora_rank=options.rank)
    runner: Runner = llm.engine.runner
    with tempfile.TemporaryDirectory() as folder:
        one, two = (write_adapter(Path(folder) / name, runner, options.rank, i) for i, name in enumerate(("a", "b")))
        cases: dict[str, tuple[LLM, list[LoRARequest | None]]] = {
            "not enabled": (plain, [None]),
            "no adapter": (llm, [None]),
            "one adapter": (llm, [one]),
            "two adapters": (llm, [one, two]),
            "two adapters and the base": (llm, [one, two, None]),
        }
        for engine, adapters in cases.values():  # warm
            measure(engine, options.batch, 4, adapters)
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
        for _ in range(options.repeat):
            for name, (engine, adapters) in cases.items():
                found[name].append(measure(engine, options.batch, options.tokens, adapters))
    print(
        f"{options.model}, batch {options.batch}, rank {options.rank}, medians of {options.repeat}, tokens per second"
    )
    print("| batch | prefill | decode |\n|---|---|---|")
    for name, rounds in found.items():
        prefill, decode = (statistics.median(figures) for figures in zip(*rounds, strict=True))
        print(f"| {name} | {prefill:,.0f} | {decode:,.0f} |")


if __name__ == "__main__":
    main()
