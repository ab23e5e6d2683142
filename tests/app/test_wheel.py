"""What is installed is all that there is, and is found from a folder in which nothing lies."""

import os
import subprocess
import sys
from pathlib import Path

from tests.live_server import REPOSITORY
from tests.wheel import PACKAGES


def files(folder: Path) -> set[str]:
    paths = (path for name in PACKAGES for path in (folder / name).rglob("*"))
    return {str(path.relative_to(folder)) for path in paths if path.is_file() and "__pycache__" not in path.parts}


def test_the_wheel_has_every_file_of_its_packages_and_nothing_else(wheel: Path) -> None:
    assert files(wheel) == files(REPOSITORY)
    others = [path.name for path in wheel.iterdir() if path.name not in PACKAGES]
    assert len(others) == 1
    assert others[0].endswith(".dist-info")


PROGRAM = """
from importlib.metadata import entry_points
import app, engine, kernels.build
(command,) = entry_points(group="console_scripts", name="nanoserve")
(shards,) = entry_points(group="nanoserve.shards")
assert (command.load().__module__, shards.load().__module__) == ("app.cli", "app.local_shards")
assert type(app.deployment).__name__ == "Application"
print(app.__file__, engine.__file__, kernels.build.SOURCES)
"""


def test_what_is_started_from_elsewhere_is_found_in_it(wheel: Path, tmp_path: Path) -> None:
    """`nanoserve`, the shards of `LLM`, and what `serve run app:deployment` loads."""
    environment = os.environ | {"PYTHONPATH": str(wheel)}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(Path(name).is_relative_to(wheel) for name in done.stdout.split())
