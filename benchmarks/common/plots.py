"""Draws result files: `python plots.py ratios|curves OUT.svg RESULT.json...`, in an environment that has matplotlib.

ratios: for each measure, this engine's speed over each peer's, from one file or several.
curves: for each curve in the file, its figure against batch or context, one line for each engine.
"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

COLOURS = {
    "nanoserve": "#d1495b",
    "openvino": "#30638e",
    "openvino-f32": "#7fb2e5",
    "llamacpp": "#2e933c",
    "vllm": "#edae49",
    "transformers": "#7d7d7d",
}
"""Of an engine, in every plot the same."""


def ratios(results: list[dict[str, Any]]) -> Any:
    figure, axes = plt.subplots(figsize=(9, 3.6))
    bars = []
    for result in results:
        precision = result["header"]["precision"]
        peers = [key.removeprefix("ratio to ") for key in result["rows"][0] if key.startswith("ratio to ")]
        bars += [(peer, precision, result["rows"]) for peer in peers]
    measures = list(dict.fromkeys(row["measure"] for _, _, rows in bars for row in rows))
    width = 0.8 / len(bars)
    for index, (peer, precision, rows) in enumerate(bars):
        values = {row["measure"]: row.get(f"ratio to {peer}") for row in rows}
        shown = [(place, values[measure]) for place, measure in enumerate(measures) if values.get(measure) is not None]
        axes.bar(
            [place + (index - (len(bars) - 1) / 2) * width for place, _ in shown],
            [value - 1 for _, value in shown],  # from the line of equal speed, up or down
            width,
            bottom=1,
            label=f"{peer}, {precision}",
            color=COLOURS[peer],
            hatch="//" if precision == "int8" else None,
            edgecolor="white",
        )
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_yscale("log")
    axes.set_yticks([0.5, 1, 2, 4, 8, 16], ["0.5", "1", "2", "4", "8", "16"])
    axes.minorticks_off()
    axes.set_xticks(range(len(measures)), measures, rotation=30, ha="right")
    axes.set_ylabel("nanoserve / peer, tokens per second")
    axes.legend(ncols=3, fontsize="small", frameon=False)
    return figure


def curves(results: list[dict[str, Any]]) -> Any:
    names = list(dict.fromkeys(row["curve"] for result in results for row in result["rows"]))
    figure, places = plt.subplots(1, len(names), figsize=(5 * len(names), 3.6), squeeze=False)
    for axes, name in zip(places[0], names, strict=True):
        for result in results:
            rows = [row for row in result["rows"] if row["curve"] == name]
            dashes = "--" if result["header"]["precision"] == "fp32" else "-"
            for engine in COLOURS:
                points = [(row["x"], row[engine]) for row in rows if engine in row]
                if points:
                    label = f"{engine}, {result['header']['precision']}"
                    axes.plot(*zip(*points, strict=True), dashes, marker="o", color=COLOURS[engine], label=label)
            axes.set_xlabel(rows[0]["axis"])
            axes.set_ylabel(rows[0]["unit"])
        if name == "batch":
            axes.set_xscale("log", base=2)
            axes.set_yscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:.0f}")
            axes.yaxis.set_major_formatter("{x:.0f}")
        else:
            axes.set_ylim(bottom=0)
        axes.set_title(name)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small", frameon=False)
    return figure


KINDS = {"ratios": ratios, "curves": curves}


def main() -> None:
    kind, out, *files = sys.argv[1:]
    plt.rcParams["svg.fonttype"] = "none"  # text as text: small, and it can be searched
    plt.rcParams["svg.hashsalt"] = "nanoserve"
    figure = KINDS[kind]([json.loads(Path(file).read_text()) for file in files])
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None})


if __name__ == "__main__":
    main()
