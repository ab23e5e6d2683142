"""The throughput benchmark runs on a tiny model, and its arithmetic."""

import json
from pathlib import Path

import pytest

from benchmarks import throughput
from benchmarks.throughput import PoolSample, fill_at_saturation
from engine.device import memory
from tests import tiny_models


def test_fill_counts_only_steps_with_most_sequences_running() -> None:
    samples = [PoolSample(1, 1, 16), PoolSample(2, 24, 32), PoolSample(2, 32, 32), PoolSample(1, 4, 16)]
    assert fill_at_saturation(samples) == (0.75, 0.875, 2)


def test_all_workloads_print_json_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(throughput, "FIXED_BATCHES", (1, 2))
    monkeypatch.setattr(throughput, "FIXED_TOKENS", 16)
    monkeypatch.setattr(throughput, "DRAWN_TOKENS", (20, 40))
    monkeypatch.setattr(memory, "CPU_CACHE_LIMIT", 64 << 20)
    throughput.main(["--model", str(tiny_models.llama(tmp_path)), "--threads", "1", "--json"])
    head, *rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert head["threads"] == 1
    assert {"date", "cpu", "torch", "commit", "model", "dtype"} <= set(head)
    measured = [(row["workload"], row["batch"]) for row in rows]
    assert measured == [("fixed", 1), ("fixed", 2), ("mixed", 32), ("nano", 64)]
    assert all(row["engine"] == "nanoserve" and row["out_tok_s"] > 0 for row in rows)
    nano = rows[-1]
    assert nano["running_max"] == 64
    assert 0.5 <= nano["slot_fill_min"] <= nano["slot_fill_mean"] <= 1
