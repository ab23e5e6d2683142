"""The official clients: chat, streams, tools, structured output."""

import json
import shutil
import tempfile
from pathlib import Path

from tests.conformance.environments import INSIDE, installed_version, node_environment, python_environment, run_inside
from tests.conformance.report import Outcome, SuiteResult
from tests.conformance.server import Running

PYTHON_PACKAGES = ["openai"]
NODE_PACKAGES = ["openai"]
LIMIT_S = 300


def run_python(server: Running) -> SuiteResult:
    python = python_environment("openai-python", PYTHON_PACKAGES)
    with tempfile.TemporaryDirectory() as folder:
        output = run_inside([python, INSIDE / "client.py", server.url, server.model], Path(folder), LIMIT_S)
    return SuiteResult("openai (Python)", installed_version(python, "openai"), read(output))


def run_javascript(server: Running) -> SuiteResult:
    node, folder = node_environment("openai-javascript", NODE_PACKAGES)
    shutil.copy(INSIDE / "client.mjs", folder)  # Node looks for packages beside the program
    output = run_inside([node, "client.mjs", server.url, server.model], folder, LIMIT_S)
    version = json.loads((folder / "node_modules" / "openai" / "package.json").read_text())["version"]
    return SuiteResult("openai (JavaScript)", version, read(output))


def read(output: str) -> list[Outcome]:
    return [Outcome(**json.loads(line)) for line in output.splitlines()]
