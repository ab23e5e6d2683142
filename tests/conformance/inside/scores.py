"""lm-eval's `hf` and `local-completions` on the same weights and tasks: one JSON object a line for each text scored.

python scores.py SERVER MODEL WEIGHTS   in a folder with the tasks and their texts
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager

TASKS = ["nanoserve_questions", "nanoserve_texts"]


def main() -> None:
    server, model, weights = sys.argv[1:]
    theirs = scores("hf", {"pretrained": weights, "dtype": "float32", "device": "cpu", "batch_size": 4})
    ours = scores(
        "local-completions",
        {
            "base_url": f"{server}/v1/completions",
            "model": model,
            "tokenizer": weights,
            "tokenizer_backend": "huggingface",
            "tokenized_requests": True,
            "num_concurrent": 4,
            "batch_size": 2,
            "max_length": 1024,
        },
    )
    print(json.dumps({"versions": {name: version(name) for name in ("lm-eval", "transformers", "torch")}}))
    for case, value in theirs.items():
        print(json.dumps({"case": case, "hf": value, "server": ours[case]}))


def scores(kind: str, arguments: dict[str, Any]) -> dict[str, list[float]]:
    """Of each choice or text, and the accuracy or perplexity of each task."""
    found = lm_eval.simple_evaluate(
        model=kind,
        model_args=arguments,
        tasks=TASKS,
        task_manager=TaskManager(include_path=str(Path.cwd()), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )
    values = {}
    for task in TASKS:
        for sample in found["samples"][task]:
            values[f"{task}/{sample['doc_id']}"] = _numbers(sample["filtered_resps"])
        for metric, value in found["results"][task].items():
            if isinstance(value, float) and "stderr" not in metric:
                values[f"{task}/{metric}"] = [value]
    return values


def _numbers(responses: Any) -> list[float]:
    """A loglikelihood and whether it is what greedy decoding gives; or a loglikelihood alone."""
    return [
        float(number)
        for response in responses
        for number in (response if isinstance(response, (list, tuple)) else [response])
    ]


if __name__ == "__main__":
    main()
