"""gpu-check on a machine without a GPU: it says so; its pages keep what was measured; its load runs on a CPU."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import gpu_check
from benchmarks.gpu_load import QWEN3_06B, Load, measure, num_weights, write_model

ROOT = Path(__file__).parents[2]


def test_without_a_gpu_it_says_so_and_exits_with_2(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--out", str(tmp_path / "page.md")]
    result = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, env={"CUDA_VISIBLE_DEVICES": ""}
    )
    assert result.returncode == 2
    assert "no CUDA device" in result.stderr
    assert not (tmp_path / "page.md").exists()


def test_a_page_keeps_what_was_there_when_something_failed(tmp_path: Path) -> None:
    page = gpu_check.Page(tmp_path / "page.md", time.monotonic() + 60)

    def fail() -> None:
        page.row("measured", 1)
        raise RuntimeError("out of\nmemory")

    page.attempt("first", fail)
    page.attempt("second", lambda: page.row("measured", 2))
    page.end = time.monotonic()
    page.attempt("third", lambda: page.row("measured", 3))
    text = page.path.read_text()
    assert "| measured | 1 |" in text
    assert "first failed: RuntimeError: out of memory" in text
    assert "| measured | 2 |" in text
    assert "third: no time left" in text
    assert "| measured | 3 |" not in text
    assert page.failures == ["first", "third"]


def test_the_floor_by_numbers() -> None:
    # Two requests decode together: three steps of weights; contexts of 10, 11, 12 and of 5.
    assert Load([10, 5], [3, 1]).decode_bytes(weight_bytes=1000, token_bytes=2) == 3000 + 2 * (33 + 5)
    assert num_weights(QWEN3_06B) == pytest.approx(0.596e9, rel=0.01)
    load = Load.draw(256, 1024)
    assert all(100 <= n <= 1024 for n in (*load.prompts, *load.outputs))


def test_the_load_runs_and_counts(tmp_path: Path) -> None:
    shape = QWEN3_06B | {
        "vocab_size": 384,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    settings = {"device": "cpu", "dtype": "float32", "num_gpu_blocks_override": 40, "num_threads": 1}
    job = {"requests": 5, "longest": 24, "settings": settings, "single": 8, "copy_bytes": 1 << 20}
    figures = measure(job, write_model(tmp_path / "model", shape))
    assert set(gpu_check.LOAD_COLUMNS) <= set(figures)
    assert figures["out_tok_s"] > 0
    assert figures["kv_blocks"] == 40
