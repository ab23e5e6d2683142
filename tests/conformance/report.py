"""What a suite found, and the one table of all of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Outcome:
    """One case. note: what is to be told of it: why it failed, or a figure."""

    case: str
    passed: bool
    note: str = ""


@dataclass(frozen=True, slots=True)
class SuiteResult:
    """explained: cases that may fail, each with its reason."""

    suite: str
    version: str
    outcomes: Sequence[Outcome]
    seconds: float = 0.0
    explained: Mapping[str, str] = field(default_factory=dict)

    @property
    def failures(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if not outcome.passed]

    @property
    def unexplained(self) -> list[Outcome]:
        return [outcome for outcome in self.failures if outcome.case not in self.explained]

    @property
    def passed(self) -> bool:
        """Whether it ran at all, and nothing failed without a reason."""
        return bool(self.outcomes) and not self.unexplained


def table(results: Sequence[SuiteResult]) -> str:
    """Markdown: a row for each suite, then every failure, then the figures."""
    lines = ["| suite | version | passed | failed, explained | failed | seconds |", "|---|---|---|---|---|---|"]
    for result in results:
        explained = len(result.failures) - len(result.unexplained)
        passed = len(result.outcomes) - len(result.failures)
        cells = (result.suite, result.version, passed, explained, len(result.unexplained), round(result.seconds))
        lines.append(f"| {' | '.join(map(str, cells))} |")
    for result in results:
        lines += _listed(f"{result.suite}: failed", [(o.case, _reason(result, o)) for o in result.failures])
        lines += _listed(f"{result.suite}: figures", [(o.case, o.note) for o in result.outcomes if o.passed and o.note])
    return "\n".join(lines) + "\n"


def _reason(result: SuiteResult, outcome: Outcome) -> str:
    return result.explained.get(outcome.case) or f"NOT EXPLAINED: {outcome.note}"


def _listed(title: str, rows: Sequence[tuple[str, str]]) -> list[str]:
    return ["", f"{title}:", "", *(f"- `{case}`: {_one_line(text)}" for case, text in rows)] if rows else []


def _one_line(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= 600 else flat[:597] + "..."
