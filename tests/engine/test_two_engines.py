"""Engines that start together on one host do not get in each other's way."""

import subprocess
import sys
from pathlib import Path

from engine.sampling_params import SamplingParams
from tests import tiny_models
from tests.engine.build import build_engine
from tests.scripted import drain

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
from engine import LLM, SamplingParams
llm = LLM(sys.argv[1], dtype="float32", num_gpu_blocks_override=64, max_num_seqs=int(sys.argv[2]), num_threads=1)
prompts = [[5 + i, 9, 11] for i in range(24)]
for output in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), use_tqdm=False):
    print(*output.outputs[0].token_ids)
"""


def test_engines_started_together_both_serve(tmp_path: Path) -> None:
    folder = tiny_models.llama(tmp_path / "tiny")
    command = [sys.executable, "-c", SCRIPT, str(folder)]
    running = [
        subprocess.Popen([*command, seqs], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for seqs in ("5", "20")
    ]
    results = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0, 0], results
    engine = build_engine(folder)
    for i in range(24):
        engine.add_request(str(i), [5 + i, 9, 11], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    expected = drain(engine)
    for out, _ in results:
        assert [list(map(int, line.split())) for line in out.splitlines()] == [expected[str(i)] for i in range(24)]
