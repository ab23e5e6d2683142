"""Builds the C++ CPU kernels once and keeps them in the user's cache: `python -m kernels.build`.

The library's folder is named by a hash of sources, torch version, flags and compiler, so a change of any of them builds
anew and never meets an old file. A build happens in a temporary folder that is renamed when it is complete, under an
`fcntl` lock that the system drops with its holder: a killed build blocks nobody. (`torch.utils.cpp_extension.load`
leaves a lock file that hangs every later process.)

Instruction sets are chosen when the library loads, so one cache may serve machines with different CPUs.
"""

import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from filelock import FileLock

from kernels.cache_dir import cache_dir

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "cpu"
TORCH = Path(torch.__file__).parent
"""torch.utils.cpp_extension says the same, but needs setuptools, which a bare image lacks."""
LIBRARY = "nanoserve_cpu.so"
COMPILERS = ("g++", "clang++", "c++")

# -ffp-contract: a * b + c may become one FMA, which strict ISO mode forbids.
FLAGS = ("-std=c++20", "-O3", "-fPIC", "-pthread", "-ffp-contract=fast", "-fvisibility=hidden")
_AVX2 = ("-mavx2", "-mfma")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mprefer-vector-width=512")
ISA_FLAGS = {
    "portable": (),
    "avx2": _AVX2,
    "avx2_vnni": (*_AVX2, "-mavxvnni"),
    "avx512": _AVX512,
    "avx512_vnni": (*_AVX512, "-mavx512vnni"),
    "avx512_bf16": (*_AVX512, "-mavx512vnni", "-mavx512bf16"),
}


class BuildError(RuntimeError):
    """There is no C++ compiler, or it refused the sources; the message says which and what to do."""


def ensure_built(verbose: bool = False) -> Path | None:
    """The library's path, built now if the cache has none. None, with one warning that says why, if it cannot be.

    verbose: print what is done and how long it took, rather than log it.
    """
    try:
        return _find_or_build(print if verbose else logger.info)
    except (BuildError, OSError) as error:
        logger.warning(
            "CPU kernels are not built, so attention, norms and rotary run in plain torch: same results, several times "
            "slower. Reason: %s",
            error,
        )
        return None


def _find_or_build(say: Callable[[str], object]) -> Path:
    root = cache_dir()
    prefix = f"cpu-{_source_key()}"
    try:
        compiler = _compiler()
    except BuildError:
        # An image may carry the built library and no compiler.
        for library in sorted(root.glob(f"{prefix}-*/{LIBRARY}")):
            return library
        raise
    target = root / f"{prefix}-{_compiler_key(compiler)}"
    if (target / LIBRARY).exists():
        return target / LIBRARY
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / f"{target.name}.lock"):
        if (target / LIBRARY).exists():  # another process built it while this one waited
            return target / LIBRARY
        for leftover in root.glob(f"{target.name}.building-*"):  # whoever made it no longer holds the lock
            shutil.rmtree(leftover, ignore_errors=True)
        say(f"Building the CPU kernels with {shlex.join(compiler)}, once; half a minute on two cores ...")
        begin = time.perf_counter()
        folder = Path(tempfile.mkdtemp(prefix=f"{target.name}.building-", dir=root))
        try:
            _compile(compiler, folder)
            folder.chmod(0o755)
            folder.rename(target)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        say(f"Built the CPU kernels in {time.perf_counter() - begin:.1f} s: {target / LIBRARY}")
    return target / LIBRARY


def _isas() -> tuple[str, ...]:
    return tuple(ISA_FLAGS) if platform.machine().lower() in ("x86_64", "amd64") else ("portable",)


def _torch_flags() -> tuple[str, ...]:
    include = TORCH / "include"
    includes = [f"-isystem{path}" for path in (include, include / "torch/csrc/api/include")]
    return (*includes, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}")


def _link_flags() -> tuple[str, ...]:
    return ("-shared", "-pthread", f"-L{TORCH / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10")


def _source_key() -> str:
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        if path.suffix in (".cpp", ".h"):
            digest.update(f"{path.name}\n".encode() + path.read_bytes())
    digest.update(repr((torch.__version__, platform.machine(), sysconfig.get_platform(), FLAGS, ISA_FLAGS)).encode())
    return digest.hexdigest()[:16]


def _compiler() -> list[str]:
    """`CXX`, which may hold arguments, or the first of g++, clang++ and c++ on the path."""
    asked = os.environ.get("CXX")
    try:
        candidates = [shlex.split(asked)] if asked else [[name] for name in COMPILERS]
    except ValueError as error:
        raise BuildError(f"CXX is {asked!r}, which is no command line ({error})") from error
    for command in candidates:
        if command and shutil.which(command[0]):
            return command
    if asked:
        raise BuildError(f"CXX is {asked!r}, which is not on the path; set it to a C++20 compiler or unset it.")
    raise BuildError(f"no C++ compiler on the path (looked for {', '.join(COMPILERS)}); install g++ 11 or later.")


def _compiler_key(compiler: list[str]) -> str:
    version = _run([*compiler, "--version"])
    return hashlib.sha256(repr((compiler, version)).encode()).hexdigest()[:8]


def _compile(compiler: list[str], folder: Path) -> None:
    objects, commands = [], []
    for name, flags in (("bindings", _torch_flags()), ("team", ())):
        objects.append(str(folder / f"{name}.o"))
        commands.append([*compiler, *FLAGS, *flags, "-c", str(SOURCES / f"{name}.cpp"), "-o", objects[-1]])
    for isa in _isas():
        objects.append(str(folder / f"{isa}.o"))
        source = str(SOURCES / "isa.cpp")
        commands.append(
            [*compiler, *FLAGS, *ISA_FLAGS[isa], f"-DKERNELS={isa}_kernels", "-c", source, "-o", objects[-1]]
        )
    with ThreadPoolExecutor(max_workers=max(1, os.cpu_count() or 1)) as pool:
        list(pool.map(_run, commands))
    _run([*compiler, *objects, *_link_flags(), "-o", str(folder / LIBRARY)])
    for name in objects:
        Path(name).unlink()


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        tail = "\n".join((done.stderr or done.stdout).strip().splitlines()[-8:])
        raise BuildError(f"`{shlex.join(command[:1])}` ended with status {done.returncode}:\n{tail}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(0 if ensure_built(verbose=True) else 1)
