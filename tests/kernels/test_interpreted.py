"""Each Triton kernel under Triton's interpreter, which runs it on the CPU.

The interpreter is chosen when Triton is first imported, for a whole process. So the tests are in
`tests/kernels/interpreted`, in files that a plain run does not collect, and run here in a process of their own.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.kernels.ahead_of_time import launched_kernels

FOLDER = Path(__file__).parent / "interpreted"


def test_every_triton_kernel_equals_its_reference_under_the_interpreter():
    files = sorted(FOLDER.glob("check_*.py"))
    assert files
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, files)],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=FOLDER.parents[2],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-20_000:] + run.stderr[-5_000:]
    passed = int(re.search(r"(\d+) passed", run.stdout)[1])
    assert passed >= len(files)
    assert "skipped" not in run.stdout
    assert set(re.search(r"^launched: (.*)$", run.stdout, re.MULTILINE)[1].split()) == launched_kernels()
