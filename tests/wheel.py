"""The project's wheel, built and installed."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.live_server import REPOSITORY

PACKAGES = ("app", "engine", "kernels")


def installed(folder: Path) -> Path:
    """Build the wheel and unpack it below `folder`, which is all that installing a pure one does; -> where it lies."""
    sources = folder / "sources"
    for name in PACKAGES:
        shutil.copytree(REPOSITORY / name, sources / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, sources)
    build = "from setuptools.build_meta import build_wheel; build_wheel('..')"
    done = subprocess.run([sys.executable, "-c", build], cwd=sources, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "installed")
    return folder / "installed"
