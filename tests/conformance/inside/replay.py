"""Plays canitoolcall's recorded outputs to the parsers of `app.openai`; one JSON object a line for each.

Runs in that package's environment, with this repository on the path: the parsers need only the standard library.
Whole texts, texts cut at random places and character by character must give the same, and what the fixture expects.
"""

import json
import sys

from canitoolcall import checks
from canitoolcall.chunking import ChunkStrategy, split_text
from canitoolcall.fixtures import Fixture, load_families, load_fixtures
from canitoolcall.results import Observation, ParseResult, Status, StreamAccumulator

from app.openai.output import OutputReader
from app.openai.parsing import CallArguments, CallStart, Content, Reasoning
from app.openai.reasoning import MISTRAL_THINK, THINK, Marks, ThinkParser
from app.openai.tool_parsers import PARSERS

STRATEGIES = ("one", "token", "rand:1:8", "rand:2:8", "rand:3:32")
"""Of texts: `token` is one character at a time."""


def main() -> None:
    families = load_families()
    for fixture in load_fixtures(families=["qwen3-hermes", "llama", "mistral"]):
        observed = Observation(
            nonstream=parse(fixture, [fixture.raw_output]),
            streams={
                name: parse(fixture, split_text(fixture.raw_output, ChunkStrategy.parse(name))) for name in STRATEGIES
            },
        )
        rows = checks.run_checks(fixture, families[fixture.family], observed)
        status = checks.case_status(rows)
        bad = [
            f"{row.check} ({row.strategy}): {row.detail}" for row in rows if row.status in (Status.FAIL, Status.ERROR)
        ]
        passed = status in (Status.PASS, Status.SOFT_PASS)
        print(json.dumps({"case": fixture.id, "passed": passed, "note": "; ".join(bad[:1])}))


def parse(fixture: Fixture, pieces: list[str]) -> ParseResult:
    names = [tool["function"]["name"] for tool in fixture.tools]
    marks = thought_marks(fixture)
    opened = marks is not None and marks.begun_by(fixture.generation_prompt or "")
    reader = OutputReader(ThinkParser(opened, marks) if marks else None, PARSERS[parser_name(fixture)](names))
    told = StreamAccumulator()
    calls = -1
    for events in [*map(reader.feed, pieces), reader.finish()]:
        for event in events:
            match event:
                case Content(text):
                    told.add_content(text)
                case Reasoning(text):
                    told.add_reasoning(text)
                case CallStart(name):
                    calls += 1
                    told.add_tool_call(calls, name=name)
                case CallArguments(text):
                    told.add_tool_call(calls, arguments=text)
    return told.result()


def parser_name(fixture: Fixture) -> str:
    if fixture.family != "llama":
        return {"qwen3-hermes": "hermes", "mistral": "mistral"}[fixture.family]
    return "pythonic" if "Llama-4" in fixture.models[0] else "llama3_json"


def thought_marks(fixture: Fixture) -> Marks | None:
    """By the model's own template: Magistral's of July 2025 has `<think>`, its later ones `[THINK]`."""
    if fixture.family == "llama":
        return None
    if fixture.family == "qwen3-hermes":
        return THINK
    return THINK if "<think>" in fixture.raw_output else MISTRAL_THINK


if __name__ == "__main__":
    sys.exit(main())
