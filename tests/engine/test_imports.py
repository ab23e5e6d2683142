"""What each room may import, checked in fresh processes."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def loaded_after(statement: str, *modules: str) -> list[str]:
    code = f"import sys\n{statement}\nprint(*(m for m in {modules!r} if m in sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return result.stdout.split()


@pytest.mark.parametrize("module", ["engine.scheduler", "engine.block_manager", "engine.engine", "engine.step_loop"])
def test_bookkeeping_imports_no_torch(module: str) -> None:
    assert loaded_after(f"import {module}", "torch", "ray", "transformers") == []


def test_the_model_runner_needs_no_ray_and_no_gguf() -> None:
    assert loaded_after("import engine.runner_setup, engine.llm", "ray", "gguf", "starlette") == []


def test_triton_waits_for_a_tensor_on_a_gpu() -> None:
    modules = "attention, sampler, rms_norm, rotary, activation, bitmask"
    assert loaded_after(f"from kernels import {modules}", "triton", "flash_attn", "flash_attn_interface") == []


def test_the_arrows_point_from_app_to_engine_to_kernels() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout
