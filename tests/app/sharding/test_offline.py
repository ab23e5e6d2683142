"""`LLM` over shards without Serve, in a process of its own."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from app.building import build_application
from app.settings import load_settings
from engine import LLM, SamplingParams
from engine.errors import ConfigError
from engine.parallel import start
from tests import tiny_models
from tests.app.sharding.processes import alive, wait

ROOT = Path(__file__).parents[3]
PROMPTS = ["hello there", "she sells"]
GREEDY = {"temperature": 0.0, "max_tokens": 30, "ignore_eos": True}

SCRIPT = f"""
import atexit, json, sys
from importlib.metadata import EntryPoint
import ray
from engine import LLM, SamplingParams
from engine.parallel import start

def entry_points(group):
    return [EntryPoint("installed", sys.argv[2], group)]

start.entry_points = entry_points
# Runs after what comes later.
atexit.register(lambda: print(json.dumps([ray.is_initialized(), pids, texts])))
settings = json.loads(sys.argv[1])
first = LLM(**settings, tensor_parallel_size=2)
llm = LLM(**settings, tensor_parallel_size=2)
first.close()
pids = [place.pid for place in llm.engine.runner._group.places]
texts = [output.outputs[0].text for output in llm.generate({PROMPTS!r}, SamplingParams(**{GREEDY!r}), use_tqdm=False)]
"""


def test_tokens_are_those_of_one_rank_and_nothing_is_left(tmp_path: Path) -> None:
    """Though nobody has closed it, and one beside it, which started the Ray that both are on, was closed before."""
    model = tiny_models.llama(tmp_path / "tiny")
    settings = {"model": str(model), "dtype": "float32", "device": "cpu", "num_gpu_blocks_override": 64}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (entry,) = project["entry-points"][start.ENTRY_POINT].values()
    command = [sys.executable, "-c", SCRIPT, json.dumps(settings), entry]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert output.returncode == 0, output.stderr
    ray_is_left, pids, texts = json.loads(output.stdout.splitlines()[-1])
    assert not ray_is_left
    wait(lambda: not any(map(alive, pids)))
    llm = LLM(**settings)
    assert texts == [o.outputs[0].text for o in llm.generate(PROMPTS, SamplingParams(**GREEDY), use_tqdm=False)]
    llm.close()


def test_without_the_application_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(start, "entry_points", lambda group: [])
    model = tiny_models.llama(tmp_path / "tiny")
    with pytest.raises(ConfigError, match="tensor_parallel_size is 2, but nothing is installed that runs several"):
        LLM(str(model), tensor_parallel_size=2)


def test_more_ranks_than_the_heads_allow_are_refused_before_any_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(start, "entry_points", lambda group: pytest.fail("a rank was to be started"))
    model = tiny_models.llama(tmp_path / "tiny")
    message = "size is 1024, but the model has 4 attention heads, .*; its heads can be shared by 1, 2, 4"
    with pytest.raises(ConfigError, match=message):
        LLM(str(model), tensor_parallel_size=1024)
    monkeypatch.setattr("ray.is_initialized", lambda: False)  # the other tests' cluster may run
    settings = load_settings({"model": str(model), "tensor_parallel_size": 1024, "device": "cpu"}, {})
    with pytest.raises(ConfigError, match=message):
        build_application(settings)
