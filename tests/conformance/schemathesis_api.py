"""schemathesis: requests made from `/openapi.json`, good and bad, and answers held against it."""

import re
import tempfile
from pathlib import Path

from tests.conformance.environments import installed_version, python_environment, run_inside
from tests.conformance.langchain_chat import read_junit
from tests.conformance.report import Outcome, SuiteResult
from tests.conformance.server import Running

PACKAGES = ["schemathesis==4.32.5"]
SECONDS = 90
"""For all requests together: each field and boundary once, then generated ones until the time is up."""

CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance",
    "response_headers_conformance", "unsupported_method", "allow_header_conformance", "missing_required_header",
    "ignored_auth",
)  # fmt: skip


def run(server: Running) -> SuiteResult:
    python = python_environment("schemathesis", PACKAGES)
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.xml")
        command = [python.with_name("st"), "run", f"{server.url}/openapi.json", "--checks", ",".join(CHECKS)]
        command += ["--max-examples", "500", "--max-time", str(SECONDS), "--phases", "examples,coverage,fuzzing"]
        command += ["--request-timeout", "60", "--continue-on-failure", "--warnings", "off", "--seed", "1"]
        command += ["--report", "junit", "--report-junit-path", str(results)]
        output = run_inside(command, Path(folder), 5 * SECONDS)
        outcomes = read_junit(results.read_text())
    if outcomes and (counts := re.search(r"Test cases:\s+(.*generated.*)", output)):
        outcomes.append(Outcome("test cases", True, counts[1]))
    return SuiteResult("schemathesis", installed_version(python, "schemathesis"), outcomes)
