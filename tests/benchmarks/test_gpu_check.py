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


def test_output_is_read_as_it_comes_and_a_command_that_hangs_is_ended() -> None:
    code = "import sys, time; print('one', flush=True); print('why', file=sys.stderr, flush=True); time.sleep(60)"
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"ended after 3 s: why"):
        list(gpu_check.stream([sys.executable, "-c", code], 3))
    assert time.monotonic() - start < 30
    output = gpu_check.stream([sys.executable, "-c", code.replace("time.sleep(60)", "sys.exit(7)")], 60)
    assert next(output) == "one"
    with pytest.raises(RuntimeError, match=r"it ended with 7: why"):
        next(output)


def test_tests_run_side_by_side_and_failed_ones_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
    (tmp_path / "tests/gpu").mkdir(parents=True)
    (tmp_path / "test_a.py").write_text("def test_good(): pass\ndef test_bad(): assert 1 == 2, 'because'\n")
    (tmp_path / "test_b.py").write_text("import os\ndef test_good(): pass\ndef test_crash(): os.abort()\n")
    page = gpu_check.Page(tmp_path / "page.md", time.monotonic() + 100)
    parts = [["test_a.py"], ["test_b.py"]]
    page.attempt("both", lambda: gpu_check.run_tests(page, "both", parts, page.seconds_left(100)))
    text = page.path.read_text()
    assert "- FAILED test_a.py::test_bad" in text
    assert "1 failed, 2 passed" in text
    assert "both failed: RuntimeError: " in text
    assert "it ended with -6" in text
    assert "because" in (tmp_path / "page.tests.txt").read_text()


TINY = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
ON_CPU = {"device": "cpu", "dtype": "float32", "num_gpu_blocks_override": 40, "num_threads": 1}


def test_the_whole_check_makes_its_page_where_there_is_no_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a card, but for the card: a test skips itself, kernels have nothing to run on, one load fails."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    job = {"requests": 3, "longest": 24, "settings": ON_CPU, "shape": TINY, "single": 8, "copy_bytes": 1 << 20}
    bad = job | {"settings": ON_CPU | {"kv_cache_memory_bytes": 1, "num_gpu_blocks_override": None}}
    monkeypatch.setattr(gpu_check, "LOADS", {"good": job, "bad": bad})
    monkeypatch.setattr(gpu_check, "ABLATION", {})
    (tmp_path / "test_card.py").write_text("import pytest\ndef test_card(): pytest.skip('no card')\n")
    for tests in ("KERNEL_TESTS", "STEP_TESTS"):
        monkeypatch.setattr(gpu_check, tests, [[str(tmp_path / "test_card.py")]])
    assert gpu_check.main(["--out", str(tmp_path / "page.md")]) == 1
    text = (tmp_path / "page.md").read_text()
    assert "device failed" in text
    assert text.count("1 skipped") == 2
    assert "\n| good | " in text
    assert "bad failed: RuntimeError: it ended with 1:" in text
    assert "no KV cache fits" in text
    assert "kernels failed: RuntimeError: it ended with 1:" in text
    assert text.splitlines()[-1].startswith("Failed: device, ")


def test_the_floor_by_numbers() -> None:
    # Two requests decode together: three steps of weights; contexts of 10, 11, 12 and of 5.
    assert Load([10, 5], [3, 1]).decode_bytes(weight_bytes=1000, token_bytes=2) == 3000 + 2 * (33 + 5)
    assert num_weights(QWEN3_06B) == pytest.approx(0.596e9, rel=0.01)
    load = Load.draw(256, 1024)
    assert all(100 <= n <= 1024 for n in (*load.prompts, *load.outputs))


def test_the_load_runs_and_counts(tmp_path: Path) -> None:
    job = {"requests": 5, "longest": 24, "settings": ON_CPU, "single": 8, "copy_bytes": 1 << 20}
    figures = measure(job, write_model(tmp_path / "model", QWEN3_06B | TINY))
    assert set(gpu_check.LOAD_COLUMNS) <= set(figures)
    assert figures["out_tok_s"] > 0
    assert figures["kv_blocks"] == 40
