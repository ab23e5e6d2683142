"""Compiles what the launchers of `kernels.gpu` would launch, for a card that is not there, and reads the result.

A stand-in for Triton's driver names the card; a launch is compiled with Triton's own specialisation of its arguments
and not run. Nothing here needs a GPU.
"""

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

CAPABILITIES = ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))


@dataclass(frozen=True)
class Compiled:
    """One kernel for one card. shared: bytes a block takes, static and dynamic. stack: bytes a thread spills to."""

    name: str
    registers: int
    stack: int
    shared: int
    ptx: str


class _Driver:
    def __init__(self, capability: tuple[int, int]) -> None:
        self.target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)

    def get_current_device(self) -> int:
        return self.target.arch  # Triton keeps what it has compiled by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target


@contextlib.contextmanager
def compiled_launches(capability: tuple[int, int]) -> Iterator[list[Compiled]]:
    """Launches in this block are compiled for the card and collected."""
    found: list[Compiled] = []
    run, before = JITFunction.run, triton.runtime.driver._active

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        found.append(_read(run(self, *args, grid=grid, warmup=True, **kwargs)))

    triton.runtime.driver.set_active(_Driver(capability))
    JITFunction.run = compile_only
    try:
        yield found
    finally:
        JITFunction.run = run
        triton.runtime.driver._active = before


def _read(kernel: Any) -> Compiled:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack, static = (int(re.search(rf"{word}:(\d+)", said)[1]) for word in ("REG", "STACK", "SHARED"))
    return Compiled(kernel.metadata.name, registers, stack, static + kernel.metadata.shared, kernel.asm["ptx"])
