"""langchain-tests: `ChatModelIntegrationTests` through `ChatOpenAI`."""

import tempfile
from pathlib import Path
from xml.etree import ElementTree

from tests.conformance.environments import INSIDE, installed_version, python_environment, run_inside
from tests.conformance.report import Outcome, SuiteResult
from tests.conformance.server import Running

PACKAGES = ["langchain-tests==1.1.9", "langchain-openai==1.7.4", "pytest>=8", "pytest-asyncio>=0.24"]
LIMIT_S = 400

_NO_CALL = "the model, 135M parameters, answers in words where the test expects it to choose to call a tool"
EXPLAINED = {
    "test_json_mode": "the model writes a JSON object, but not the two keys that the prompt asks for, or not to its "
    "end: JSON mode holds it to no schema",
    "test_agent_loop[model0]": _NO_CALL,
    "test_agent_loop[model1]": _NO_CALL,
}


def run(server: Running) -> SuiteResult:
    python = python_environment("langchain", PACKAGES)
    with tempfile.TemporaryDirectory() as folder:
        test, results = Path(folder, "test_chat_model.py"), Path(folder, "results.xml")
        test.write_text((INSIDE / "chat_model.py").read_text())
        command = [python, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "-o", "asyncio_mode=auto"]
        command += ["-o", "asyncio_default_test_loop_scope=session", "-o", "asyncio_default_fixture_loop_scope=session"]
        command += [f"--junitxml={results}", test]
        run_inside(command, Path(folder), LIMIT_S, SERVER=server.url, MODEL=server.model)
        outcomes = read_junit(results.read_text())
    return SuiteResult("langchain-tests", installed_version(python, "langchain-tests"), outcomes, explained=EXPLAINED)


def read_junit(text: str) -> list[Outcome]:
    """Without the skipped: what the suite has for other kinds of models. An expected failure counts as one of them."""
    outcomes = []
    for case in ElementTree.fromstring(text).iter("testcase"):
        if case.find("skipped") is not None:
            continue
        failure = case.find("failure") if case.find("error") is None else case.find("error")
        note = "" if failure is None else failure.get("message", "")
        outcomes.append(Outcome(case.get("name", ""), failure is None, note))
    return outcomes
