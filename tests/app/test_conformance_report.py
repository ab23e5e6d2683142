"""What `make conformance` makes of other suites' results: no failure is lost on the way."""

from pathlib import Path

import pytest

from tests.conformance.__main__ import SUITES, write
from tests.conformance.langchain_chat import read_junit
from tests.conformance.lm_eval_scores import compared
from tests.conformance.report import Outcome, SuiteResult, table

JUNIT = """<testsuites><testsuite>
<testcase name="good"/>
<testcase name="bad"><failure message="expected 1"/></testcase>
<testcase name="broken"><error message="no server"/></testcase>
<testcase name="other"><skipped/></testcase>
</testsuite></testsuites>"""


def test_a_failure_fails_the_suite_unless_it_is_explained() -> None:
    outcomes = [Outcome("a", True), Outcome("b", False, "why")]
    assert not SuiteResult("s", "1", outcomes).passed
    assert SuiteResult("s", "1", outcomes, explained={"b": "known"}).passed
    assert not SuiteResult("s", "1", []).passed, "a suite that ran nothing"


def test_the_table_names_every_failure() -> None:
    outcomes = [Outcome("a", True, "12 ms"), Outcome("b", False, "why"), Outcome("c", False, "x")]
    text = table([SuiteResult("s", "1", outcomes, seconds=3.2, explained={"c": "known"})])
    assert "| s | 1 | 1 | 1 | 1 | 3 |" in text
    assert "`b`: NOT EXPLAINED: why" in text
    assert "`c`: known" in text
    assert "`a`: 12 ms" in text


def test_junit_results_are_read() -> None:
    assert read_junit(JUNIT) == [
        Outcome("good", True), Outcome("bad", False, "expected 1"), Outcome("broken", False, "no server")
    ]  # fmt: skip


@pytest.mark.parametrize(("server", "passed"), [([-1.0004, 1.0], True), ([-1.002, 1.0], False), ([-1.0, 0.0], False)])
def test_scores_are_compared_within_a_tolerance(server: list[float], passed: bool) -> None:
    outcomes = compared([{"case": "t/0", "hf": [-1.0, 1.0], "server": server}])
    assert [outcome.passed for outcome in outcomes] == [passed, passed]


def test_results_go_between_the_marks_of_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- results -->\nold\n<!-- end of results -->\nafter\n")
    write(page, "new\n")
    assert page.read_text() == "before\n<!-- results -->\nnew\n<!-- end of results -->\nafter\n"


def test_the_page_tells_of_every_suite() -> None:
    page = (Path(__file__).parents[2] / "docs" / "conformance.md").read_text()
    assert all(f"`{name}`" in page for name in SUITES)
