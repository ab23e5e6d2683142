"""The CPU's instruction set that the environment asks for. No torch: it is asked before anything starts."""

import os

VARIABLE = "NANOSERVE_CPU_ISA"
ISAS = ("portable", "avx2", "avx2_vnni", "avx512", "avx512_vnni", "avx512_bf16")


def isa_asked_for() -> str:
    """One of `ISAS`, or "best". Raises `ValueError` if the variable names none."""
    isa = os.environ.get(VARIABLE) or "best"
    if isa not in (*ISAS, "best"):
        raise ValueError(f"{VARIABLE} must be one of {', '.join(ISAS)} or unset, got {isa!r}")
    return isa
