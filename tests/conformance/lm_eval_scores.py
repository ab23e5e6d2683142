"""lm-eval: `local-completions` through the server against `hf` on the same weights, both in float32."""

import json
import shutil
import tempfile
from pathlib import Path

from benchmarks.peer.setup import hf_model
from engine.config import DEFAULT_MODEL
from tests.conformance.environments import INSIDE, python_environment, run_inside
from tests.conformance.report import Outcome, SuiteResult
from tests.conformance.server import Running

PACKAGES = ["lm-eval[api]==0.4.13"]
LIMIT_S = 400
TOLERANCE = 1e-3
"""Of a loglikelihood, absolute: the difference that rounding makes in float32 is far below."""


def run(server: Running) -> SuiteResult:
    python = python_environment("lm-eval", PACKAGES, with_project_packages=True)
    model = hf_model(DEFAULT_MODEL)
    with tempfile.TemporaryDirectory() as folder:
        for name in ("questions.yaml", "questions.jsonl", "texts.yaml", "texts.jsonl", "scores.py"):
            shutil.copy(INSIDE / name, folder)
        output = run_inside(
            [python, "scores.py", server.url, server.model, model],
            Path(folder),
            LIMIT_S,
            HF_HUB_OFFLINE="1",
            HF_DATASETS_OFFLINE="1",
            HF_HOME=str(Path(folder, "hf")),
            TOKENIZERS_PARALLELISM="false",
            OMP_NUM_THREADS="2",
        )
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    if not lines:
        raise RuntimeError(f"lm-eval gave no scores: {output[-2000:] or 'it said nothing'}")
    versions = " ".join(f"{name} {number}" for name, number in lines.pop(0)["versions"].items())
    return SuiteResult("lm-eval local-completions", versions, compared(lines))


def compared(lines: list[dict[str, object]]) -> list[Outcome]:
    """One outcome for each line, and one with the largest difference."""
    outcomes, worst = [], 0.0
    for line in lines:
        theirs, ours = line["hf"], line["server"]
        assert isinstance(theirs, list)
        assert isinstance(ours, list)
        difference = max(abs(a - b) for a, b in zip(theirs, ours, strict=True))
        worst = max(worst, difference)
        fits = difference <= TOLERANCE
        outcomes.append(Outcome(str(line["case"]), fits, "" if fits else f"hf {theirs}, server {ours}"))
    return [*outcomes, Outcome("largest difference", worst <= TOLERANCE, f"{worst:.2g}")]
