"""Runs suites against one server that it starts: `python -m tests.conformance [SUITE ...] [--write]`.

Ends with status 1 if a suite did not run, or failed where nothing explains it. --write puts the table into
docs/conformance.md.
"""

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path

from tests.conformance import (
    bad_bodies,
    langchain_chat,
    lm_eval_scores,
    openai_clients,
    schemathesis_api,
    tool_fixtures,
)
from tests.conformance.report import Outcome, SuiteResult, table
from tests.conformance.server import Running, serve
from tests.live_server import REPOSITORY

SUITES: dict[str, Callable[[Running], SuiteResult]] = {
    "python": openai_clients.run_python,
    "javascript": openai_clients.run_javascript,
    "langchain": langchain_chat.run,
    "canitoolcall": tool_fixtures.run,
    "lm-eval": lm_eval_scores.run,
    "schemathesis": schemathesis_api.run,
    "bad-bodies": bad_bodies.run,
}

PAGE = REPOSITORY / "docs" / "conformance.md"
BEGIN, END = "<!-- results -->\n", "<!-- end of results -->\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=", ".join(SUITES))
    parser.add_argument("--write", action="store_true", help="put the results into docs/conformance.md")
    options = parser.parse_args(argv)
    if unknown := set(options.suites) - SUITES.keys():
        parser.error(f"unknown suites {', '.join(sorted(unknown))}; known are {', '.join(SUITES)}")
    results = []
    with serve() as server:
        for name in options.suites or SUITES:
            print(f"--- {name}", flush=True)
            start = time.monotonic()
            result = _run(name, server)
            results.append(result := _timed(result, time.monotonic() - start))
            print(table([result]), flush=True)
    text = f"{date.today()}, ray {version('ray')}, torch {version('torch')}:\n\n{table(results)}"
    print(f"\n{text}")
    if options.write:
        write(PAGE, text)
    return 0 if all(result.passed for result in results) else 1


def write(page: Path, text: str) -> None:
    """Put `text` between the marks of `page`."""
    before, rest = page.read_text().split(BEGIN)
    page.write_text(before + BEGIN + text + END + rest.split(END)[1])


def _run(name: str, server: Running) -> SuiteResult:
    try:
        return SUITES[name](server)
    except Exception as error:  # one suite that cannot run hides no other
        traceback.print_exc()
        return SuiteResult(name, "?", [Outcome("the suite runs", False, f"{type(error).__name__}: {error}")])


def _timed(result: SuiteResult, seconds: float) -> SuiteResult:
    return SuiteResult(result.suite, result.version, result.outcomes, seconds, result.explained)


if __name__ == "__main__":
    sys.exit(main())
