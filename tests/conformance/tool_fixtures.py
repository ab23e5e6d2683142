"""canitoolcall: recorded outputs of Qwen3, Llama 3 and 4 and Mistral models, given to our parsers."""

import json
import tempfile
from pathlib import Path

from tests.conformance.environments import INSIDE, installed_version, python_environment, run_inside
from tests.conformance.report import Outcome, SuiteResult
from tests.conformance.server import Running
from tests.live_server import REPOSITORY

PACKAGES = ["canitoolcall==0.1.1"]
LIMIT_S = 120

_CUT = (
    "the output is cut within a call. The fixture wants no trace of it; we stream arguments as they are written, as "
    "OpenAI does, and whole answers say what streams say. finish_reason is then `length` or `stop`, not `tool_calls`"
)
EXPLAINED = dict.fromkeys(
    (
        "llama/l3-truncated-inside-parameters",
        "mistral/v13think-truncated-in-arguments",
        "qwen3-hermes/bug-sglang-30480-truncated-mid-arguments",
        "qwen3-hermes/truncated-mid-arguments-no-thinking",
        "qwen3-hermes/truncated-mid-arguments-thinking",
        "qwen3-hermes/truncated-second-parallel-call",
    ),
    _CUT,
) | {
    "qwen3-hermes/vllm-invalid-json-missing-brace": "the arguments are whole, only the brace around the call is "
    "missing; we return the call, since arguments are told as they come",
    "llama/l4-truncated-missing-close-bracket": "the list is cut in its second call; the first one is whole, and we "
    "return it, as this suite wants of the other forms",
}


def run(_: Running) -> SuiteResult:
    python = python_environment("canitoolcall", PACKAGES)
    with tempfile.TemporaryDirectory() as folder:
        output = run_inside([python, INSIDE / "replay.py"], Path(folder), LIMIT_S, PYTHONPATH=str(REPOSITORY))
    outcomes = [Outcome(**json.loads(line)) for line in output.splitlines()]
    return SuiteResult("canitoolcall", installed_version(python, "canitoolcall"), outcomes, explained=EXPLAINED)
