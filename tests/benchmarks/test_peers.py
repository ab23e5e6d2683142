"""Engines taking turns, the figures made of them, and how they are written down."""

import json
import random
import sys
from pathlib import Path

import pytest

from benchmarks.common import report
from benchmarks.peer import engines as peer_engines
from benchmarks.peer.engines import Rates, Worker, medians
from benchmarks.peers import one_round
from engine.device import memory
from tests import tiny_models


class FixedEngine:
    """An engine whose speed is known."""

    version = "1"

    def __init__(self, name: str, speed: float, log: list[str], takes_prompts: bool = True) -> None:
        self.name, self._speed, self._log, self._takes_prompts = name, speed, log, takes_prompts

    def rates(self, batch: int, prompt: int, out: int, seed: int) -> Rates:
        self._log.append(f"{self.name} {batch}")
        return Rates(self._speed * 10, self._speed)

    def seconds(self, prompts: list[list[int]], outs: list[int]) -> float | None:
        return sum(outs) / self._speed if self._takes_prompts else None

    def close(self) -> None: ...


def test_engines_take_turns_within_each_measure() -> None:
    log: list[str] = []
    engines = {"nanoserve": FixedEngine("a", 200, log), "llamacpp": FixedEngine("b", 100, log, takes_prompts=False)}
    figures = one_round(engines, seed=0)
    assert log == ["a 1", "b 1", "a 4", "b 4", "a 16", "b 16", "a 32", "b 32"]
    assert figures["nanoserve"]["decode B=4"] == 200
    assert figures["nanoserve"]["mixed"] == pytest.approx(200)
    assert "mixed" not in figures["llamacpp"]


def test_ratio_is_the_median_of_the_rounds_ratios() -> None:
    ours = [{"decode": 100.0}, {"decode": 300.0}, {"decode": 90.0}]
    theirs = [{"decode": 50.0}, {"decode": 100.0}, {"decode": 90.0}]
    (row,) = medians({"nanoserve": ours, "openvino": theirs})
    assert row == {"measure": "decode", "nanoserve": 100.0, "openvino": 90.0, "ratio to openvino": 2.0}


def test_a_measure_that_a_peer_does_not_have_has_no_ratio(tmp_path: Path) -> None:
    rounds = {"nanoserve": [{"decode": 2.0, "mixed": 4.0}], "llamacpp": [{"decode": 1.0}]}
    rows = medians(rounds)
    file = report.save(tmp_path, "peers", {"precision": "fp32"}, rows, rounds=rounds)
    assert json.loads(file.read_text())["rows"] == rows
    assert file.with_suffix(".md").read_text().splitlines()[2:] == [
        "| measure | nanoserve | llamacpp | ratio to llamacpp |",
        "|---|---|---|---|",
        "| decode | 2.0 | 1.0 | 2.0 |",
        "| mixed | 4.0 | - | - |",
    ]


def test_this_engine_answers_as_a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_engines, "MAX_TOKEN_ID", tiny_models.VOCAB_SIZE - 1)
    settings = {"kv_cache_memory_bytes": memory.CPU_CACHE_LIMIT >> 6}
    worker = Worker("nanoserve", Path(sys.executable), tiny_models.llama(tmp_path), 1, settings)
    try:
        assert worker.version.startswith("torch ")
        rates = worker.rates(2, 16, 16, seed=0)
        assert rates.prefill > 0
        seconds = worker.seconds(peer_engines.random_prompts(random.Random(0), [4, 9]), [3, 40])
        assert seconds is not None
        assert 0 < seconds < 60
    finally:
        worker.close()


def test_a_worker_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"nanoserve ended:(.|\n)*no config\.json"):
        Worker("nanoserve", Path(sys.executable), tmp_path, 1, {})


def test_header_names_the_class_of_the_hardware_and_no_machine() -> None:
    head = report.header(["--results", "/a/b", "--rounds", "1"], "benchmarks.peers", precision="fp32")
    assert head["command"] == "python -m benchmarks.peers --rounds 1"
    assert "cores" in head["hardware"]
    assert "cpu" not in head
