"""The engine runs where only torch, triton, transformers, safetensors, numpy and pytest are: a bare CUDA image.

So do the tests and measurements of a card, as far as they can run without one.
"""

import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

from tests import tiny_models

ROOT = Path(__file__).parents[2]
INSTALLED = ("torch", "triton", "transformers", "safetensors", "numpy", "pytest")

PROGRAM = '''
import os, sys

os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"

class Without:
    """A finder that does not find what is blocked: libraries ask whether others are there."""

    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in BLOCKED else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path if hasattr(finder, "find_spec")]

import benchmarks.gpu_check, benchmarks.gpu_load, benchmarks.kernels_gpu, pytest
from engine import LLM, SamplingParams

# The tests of a card read all that they need, and find no card.
assert pytest.main(["-q", "--confcutdir=tests/gpu", "-p", "no:cacheprovider", "tests/gpu"]) == 5
llm = LLM(FOLDER, load_format="dummy", device="cpu", num_gpu_blocks_override=32, swap_space=0.001, num_threads=1)
outputs = llm.generate(["a fox", [5, 6, 7]], SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=5))
print(*(len(output.outputs[0].token_ids) for output in outputs))
llm.close()
'''


def names_needed(name: str, seen: set[str]) -> set[str]:
    """Distributions that come with `name`, itself among them."""
    name = re.sub(r"[-_.]+", "-", name).lower()
    if name not in seen:
        try:
            lines = requires(name) or []
        except PackageNotFoundError:
            return seen
        seen.add(name)
        for line in lines:
            # torch asks for setuptools for its compiler of extensions alone, and images leave it out.
            if "extra ==" not in line and not line.startswith("setuptools"):
                names_needed(re.match(r"[\w.-]+", line)[0], seen)
    return seen


def test_engine_and_gpu_check_run_on_six_packages(tmp_path: Path) -> None:
    needed: set[str] = set()
    for name in INSTALLED:
        names_needed(name, needed)
    blocked = {
        module
        for module, owners in packages_distributions().items()
        if not any(re.sub(r"[-_.]+", "-", owner).lower() in needed for owner in owners)
    }
    blocked -= {"app", "engine", "kernels", "benchmarks", "tests"}
    assert {"setuptools", "ray", "gguf", "llguidance", "starlette", "platformdirs"} <= blocked
    folder = tiny_models.llama(tmp_path / "model")
    program = f"BLOCKED, FOLDER = {blocked!r}, {str(folder)!r}\n{PROGRAM}"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split()[-2:] == ["5", "5"]
