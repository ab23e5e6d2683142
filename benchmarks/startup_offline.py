"""A process that goes from nothing to one token and says how long each part took: see `startup.py`, which runs it.

    python -m benchmarks.startup_offline BEGUN SETTINGS

BEGUN is the time at which the process was started, in seconds since the epoch; SETTINGS those of the engine, as JSON.
"""

# ruff: noqa: E402, F401, I001

import json
import sys
import time

parts: dict[str, float] = {}
_before = float(sys.argv[1])


def part_is_done(name: str) -> None:
    global _before
    now = time.time()
    parts[name] = now - _before
    _before = now


part_is_done("python")

import engine  # first: it sets how OpenMP waits, and torch reads that
import torch

part_is_done("import torch")

from engine.config import EngineConfig
from engine.engine import Engine
from engine.llm import LLM
from engine.sampling_params import SamplingParams
from engine.text.tokenizer import load_tokenizer
from kernels import cpu_ops

part_is_done("import the engine")

cpu_ops.load()
part_is_done("load the kernels")

loaded = Engine.from_config(EngineConfig(**json.loads(sys.argv[2])))
part_is_done("load and pack the model")

assert loaded.info.model_path is not None
llm = LLM.from_engine(loaded, load_tokenizer(loaded.info.model_path))
part_is_done("load the tokenizer")

llm.generate([list(range(5, 21))], SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
part_is_done("first token")

print(json.dumps(parts))
