"""nano-vllm's benchmark on one GPU, as one measurement in a process of its own, printed as one line of JSON.

    python -m benchmarks.gpu_load '{"settings": {"kv_cache_dtype": "fp8"}, "requests": 256, "longest": 1024}'

The model has the shape of Qwen3-0.6B and random weights. Each request has 100 to `longest` prompt tokens and as many
output tokens, temperature 0.6, no EOS. "references" lets the elementwise kernels run as plain torch; "shape" has other
values for the model's config.

The floor is the time to read, at the bandwidth that a large copy reaches on this card, the weights once a step and each
token's context once: nothing that decodes these tokens together can be faster.
"""

import importlib
import json
import random
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.sampling_params import SamplingParams

QWEN3_06B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "hidden_act": "silu",
    "dtype": "bfloat16",
    "eos_token_id": 151_645,
}
SHORTEST = 100
MAX_TOKEN_ID = 10_000


@dataclass(frozen=True)
class Load:
    """Prompt and output lengths of the requests."""

    prompts: list[int]
    outputs: list[int]

    @classmethod
    def draw(cls, num_requests: int, longest: int) -> "Load":
        rng = random.Random(0)
        shortest = min(SHORTEST, longest)
        prompts = [rng.randint(shortest, longest) for _ in range(num_requests)]
        return cls(prompts, [rng.randint(shortest, longest) for _ in range(num_requests)])

    def decode_bytes(self, weight_bytes: int, token_bytes: int) -> int:
        """Bytes that must be read to decode it all at once: weights each step, and every token's context."""
        contexts = sum(
            prompt * output + output * (output - 1) // 2
            for prompt, output in zip(self.prompts, self.outputs, strict=True)
        )
        return max(self.outputs) * weight_bytes + contexts * token_bytes


def write_model(folder: Path, shape: dict[str, Any] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape or QWEN3_06B))
    return folder


def num_weights(shape: dict[str, Any]) -> int:
    """Of the matrices that a step reads: all projections, and the output head."""
    hidden, heads, kv_heads = shape["hidden_size"], shape["num_attention_heads"], shape["num_key_value_heads"]
    attention = hidden * shape["head_dim"] * (2 * heads + 2 * kv_heads)
    layer = attention + 3 * hidden * shape["intermediate_size"]
    return int(shape["num_hidden_layers"] * layer + shape["vocab_size"] * hidden)


def copy_bandwidth(device: torch.device, num_bytes: int = 1 << 30) -> float:
    """Bytes read and written a second by a device's copies of `num_bytes`."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best, copies = float("inf"), 8
    for _ in range(6):
        _wait(device)
        start = time.perf_counter()
        for _ in range(copies):
            target.copy_(source)
        _wait(device)
        best = min(best, time.perf_counter() - start)
    return 2 * num_bytes * copies / best


def run(engine: Engine, load: Load) -> float:
    """Seconds to serve the load, all of it there from the beginning."""
    rng = random.Random(1)
    highest = min(MAX_TOKEN_ID, engine.info.vocab_size - 1)
    for i, (prompt, output) in enumerate(zip(load.prompts, load.outputs, strict=True)):
        params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=output, seed=i)
        engine.add_request(str(i), [rng.randint(0, highest) for _ in range(prompt)], params)
    start = time.perf_counter()
    while engine.has_work():
        if failed := [end.error for end in engine.step().finished if end.error]:
            raise RuntimeError(failed[0])
    return time.perf_counter() - start


def measure(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """job: settings of the engine, requests, longest; references: no fused elementwise kernels."""
    settings = {"load_format": "dummy", "max_model_len": 4096, "enable_prefix_caching": False} | job.get("settings", {})
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # Before the engine takes the memory. What is freed here must not count as in use there.
    bandwidth = copy_bandwidth(device, job.get("copy_bytes", 1 << 30))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    start = time.perf_counter()
    with _references() if job.get("references") else nullcontext():
        engine = Engine.from_config(EngineConfig.from_kwargs(model=str(folder), **settings))
        ready = time.perf_counter() - start
        runner: Any = engine.runner
        token_bytes = sum(part[0].nbytes for layer in runner.caches for part in layer) // engine.info.block_size
        weight_bytes = num_weights(json.loads((folder / "config.json").read_text())) * runner.dtype.itemsize
        load = Load.draw(job["requests"], job["longest"])
        run(engine, Load.draw(4, min(64, job["longest"])))  # compiles what is compiled at first use
        preemptions = engine.stats().preemptions
        seconds = run(engine, load)
        single = Load([16], [job.get("single", 128)])
        step = run(engine, single) / single.outputs[0]
    tokens = sum(load.outputs)
    floor = load.decode_bytes(weight_bytes, token_bytes) / bandwidth
    result = {
        "start_s": round(ready, 1),
        "seconds": round(seconds, 2),
        "out_tok_s": round(tokens / seconds),
        "floor_tok_s": round(tokens / floor),
        "share_of_floor": round(floor / seconds, 3),
        "batch1_step_us": round(step * 1e6),
        "batch1_over_weights": round(step * bandwidth / weight_bytes, 2),
        "copy_gb_s": round(bandwidth / 1e9),
        "kv_blocks": engine.info.num_blocks,
        "preemptions": engine.stats().preemptions - preemptions,
    }
    engine.close()
    return result


def _references() -> Any:
    """Plain torch in place of the elementwise kernels of a GPU."""
    return mock.patch.object(importlib.import_module("kernels.gpu"), "usable", return_value=False)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        job = json.loads(sys.argv[1])
        shape = QWEN3_06B | job.get("shape", {})
        print(json.dumps(measure(job, write_model(Path(folder) / "qwen3-0.6b-shape", shape))))


if __name__ == "__main__":
    main()
