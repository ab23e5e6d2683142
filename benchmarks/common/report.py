"""Figures as files: a JSON and a Markdown file in `benchmarks/results/`, and a plot."""

import datetime
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peer import setup as peer_setup
from benchmarks.throughput import machine

RESULTS = Path(__file__).parents[1] / "results"
PLOTS = Path(__file__).with_name("plots.py")

INSTRUCTION_SETS = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx512_vnni": "VNNI",
    "avx512_bf16": "BF16",
    "amx_tile": "AMX",
}


def header(argv: Sequence[str], module: str, **more: Any) -> dict[str, Any]:
    """What was measured, when and on what: the class of the hardware, not its name."""
    about = machine()
    about.pop("cpu")
    words = list(argv)
    if "--results" in words:  # where figures are written is no part of what was measured, and names a folder
        del words[words.index("--results") : words.index("--results") + 2]
    command = " ".join(["python -m", module, *words])
    return {"command": command, "hardware": hardware_class()} | about | more


def hardware_class() -> str:
    """As in "2 cores, AVX2, AVX-512, VNNI"."""
    flags: set[str] = set()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            flags = set(line.split())
            break
    sets = [name for flag, name in INSTRUCTION_SETS.items() if flag in flags]
    return ", ".join([f"{len(os.sched_getaffinity(0))} cores", *sets])


def markdown(head: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """The header as one line of JSON, and a table of the rows' scalars; a row need not have every column."""
    columns = list(dict.fromkeys(key for row in rows for key, value in row.items() if not isinstance(value, list)))
    lines = [json.dumps(head), "", f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    lines += [f"| {' | '.join(str(row.get(column, '-')) for column in columns)} |" for row in rows]
    return "\n".join(lines) + "\n"


def save(folder: Path, name: str, head: dict[str, Any], rows: Sequence[dict[str, Any]], **more: Any) -> Path:
    """Write DATE-name.json and .md into `folder`; returns the path of the JSON file."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}-{name}"
    stem.with_suffix(".md").write_text(markdown(head, rows))
    file = stem.with_suffix(".json")
    file.write_text(json.dumps({"header": head, "rows": rows} | more, indent=1) + "\n")
    return file


def plot(kind: str, out: Path, files: Sequence[Path]) -> None:
    """Draw the JSON files as `out`, with matplotlib in an environment of its own; see `plots.py`."""
    command = [str(peer_setup.environment("plots")), str(PLOTS), kind, str(out), *map(str, files)]
    subprocess.run(command, check=True, stdout=sys.stderr)
