"""The builder: one build for many processes, no lock left by a killed one, plain torch where there is no compiler."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kernels import build

# Stands in for the C++ compiler, so that what the builder does can be watched without compiling: it answers
# --version, writes each output file, and notes each call.
FAKE_COMPILER = """#!/bin/sh
for last; do :; done
if [ "$last" = --version ]; then echo fake 1; exit 0; fi
echo call >> "$(dirname "$0")/calls"
sleep {seconds}
echo library > "$last"
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOSERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def fake_compiler(folder: Path, seconds: float) -> str:
    path = folder / "fake-c++"
    path.write_text(FAKE_COMPILER.format(seconds=seconds))
    path.chmod(0o755)
    return str(path)


def build_process(**environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "kernels.build"],
        env={**os.environ, **environment},
        cwd=Path(build.__file__).parent.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_processes_that_start_together_build_once(cache, tmp_path):
    compiler = fake_compiler(tmp_path, 0.3)
    builders = [build_process(CXX=compiler) for _ in range(3)]
    said = [builder.communicate(timeout=60) for builder in builders]
    assert [builder.returncode for builder in builders] == [0, 0, 0], said
    assert sum("Building" in out for out, _ in said) == 1
    assert len((tmp_path / "calls").read_text().split()) == 3 + len(build._isas())
    assert len(list(cache.glob(f"cpu-*/{build.LIBRARY}"))) == 1
    assert not list(cache.glob("*.building-*"))


def test_a_killed_build_leaves_nothing_that_blocks_the_next(cache, tmp_path):
    compiler = fake_compiler(tmp_path, 600)
    killed = build_process(CXX=compiler)
    deadline = time.monotonic() + 60
    while not (tmp_path / "calls").exists():
        assert time.monotonic() < deadline, killed.poll()
        time.sleep(0.05)
    os.killpg(killed.pid, signal.SIGKILL)  # its own session: the sleeping compiler goes with it
    killed.wait()
    assert list(cache.glob("*.building-*"))
    fake_compiler(tmp_path, 0)
    again = build_process(CXX=compiler)
    out, err = again.communicate(timeout=60)
    assert again.returncode == 0, out + err
    assert len(list(cache.glob(f"cpu-*/{build.LIBRARY}"))) == 1
    assert not list(cache.glob("*.building-*"))


def test_a_compiler_that_fails_is_one_warning_with_its_words(cache, tmp_path, monkeypatch, caplog):
    path = tmp_path / "broken-c++"
    path.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "no such header" >&2\nexit 1\n')
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    assert build.ensure_built() is None
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "no such header" in caplog.text
    assert "plain torch" in caplog.text
    assert not list(cache.glob("*.building-*"))


def test_no_compiler_names_what_was_looked_for(cache, monkeypatch, caplog):
    monkeypatch.setenv("CXX", "'unclosed")
    with pytest.raises(build.BuildError, match="unclosed"):
        build._compiler()
    monkeypatch.setenv("CXX", "no-such-compiler --flag")
    assert build.ensure_built() is None
    assert "no-such-compiler" in caplog.text
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(cache))
    assert build.ensure_built() is None
    assert "g++, clang++, c++" in caplog.text


def test_a_built_library_is_found_without_a_compiler(cache, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, 0))
    library = build.ensure_built()
    assert library is not None
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build.ensure_built() == library


def test_another_source_or_compiler_is_another_build(cache, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, 0))
    first = build.ensure_built()
    monkeypatch.setenv("CXX", f"{tmp_path / 'fake-c++'} -O1")
    second = build.ensure_built()
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "isa.cpp").write_text("// changed")
    monkeypatch.setattr(build, "SOURCES", sources)
    third = build.ensure_built()
    assert len({first, second, third}) == 3


USE = """
import logging, torch
logging.basicConfig(level="WARNING")
from kernels import cpu_ops
from kernels.attention import select_backend
from kernels.rms_norm import rms_norm, reference
x, w = torch.randn(3, 64), torch.ones(64)
torch.testing.assert_close(rms_norm(x, w, 1e-5), reference(x, w, 1e-5))
print(cpu_ops.load(), select_backend("cpu", torch.float32, 64).name)
"""


def run_use(**environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", USE],
        env={**os.environ, **environment},
        cwd=Path(build.__file__).parent.parent,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_without_a_compiler_everything_runs_in_torch_after_one_warning(tmp_path):
    done = run_use(CXX="no-such-compiler", NANOSERVE_CACHE=str(tmp_path))
    assert done.stdout.split() == ["False", "torch"], done.stderr
    assert done.stderr.count("WARNING") == 1
    assert "no-such-compiler" in done.stderr


def test_a_library_that_does_not_load_falls_back_to_torch(tmp_path):
    done = run_use(CXX=fake_compiler(tmp_path, 0), NANOSERVE_CACHE=str(tmp_path / "cache"))
    assert done.stdout.split() == ["False", "torch"], done.stderr
    assert done.stderr.count("WARNING") == 1


def test_the_environment_chooses_the_instruction_set():
    assert run_use(NANOSERVE_CPU_ISA="portable").stdout.split() == ["True", "cpu"]
    wrong = run_use(NANOSERVE_CPU_ISA="sse9")
    assert wrong.returncode != 0
    allowed = "portable, avx2, avx2_vnni, avx512, avx512_vnni, avx512_bf16"
    assert f"NANOSERVE_CPU_ISA must be one of {allowed} or unset, got 'sse9'" in wrong.stderr


def test_no_symbol_of_one_instruction_set_can_stand_in_for_anothers(tmp_path):
    """A weak symbol, such as a template's table, would be merged: portable code could land in AVX-512 instructions."""
    target = str(tmp_path / "portable.o")
    source = str(build.SOURCES / "isa.cpp")
    build._run([*build._compiler(), *build.FLAGS, "-DKERNELS=portable_kernels", "-c", source, "-o", target])
    symbols = [line.split(maxsplit=2) for line in build._run(["nm", "--defined-only", target]).splitlines()]
    assert any("portable_kernels" in name for _, _, name in symbols)
    # DW.ref is a pointer of the exception tables, the same in all.
    assert [name for _, kind, name in symbols if kind in "VvWwu" and not name.startswith("DW.ref.")] == []
