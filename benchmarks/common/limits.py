"""What a machine allows a CPU kernel, read bandwidth and multiply-adds, and how near to it one comes."""

import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass
class Row:
    """Milliseconds for all layers of a step, with the bytes it must read and the multiply-adds it must do.

    torch_ms is of plain torch in float32, but for `quantized_linear` of the packed float32 kernel (bfloat16 weights).
    arithmetic: the peak that the multiply-adds are held against.
    """

    op: str
    case: str
    kernel_ms: float
    torch_ms: float
    read_bytes: float
    macs: float = 0.0
    arithmetic: str = "fp32"


@dataclass
class Limits:
    """Of this machine, with this number of threads: bytes read a millisecond, multiply-adds a millisecond by type."""

    bytes_per_ms: float
    macs_per_ms: dict[str, float]

    def shares(self, row: Row) -> tuple[float, float]:
        """Of the bandwidth and of the peak rate that the kernel reaches."""
        peak = self.macs_per_ms[row.arithmetic]
        return row.read_bytes / row.kernel_ms / self.bytes_per_ms, row.macs / row.kernel_ms / peak if peak else 0.0


def best_ms(run: Callable[[], object], repeats: int = 5) -> float:
    run()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times) * 1e3


def read_bandwidth() -> float:
    """Bytes a millisecond that all threads together read from memory."""
    data = torch.ones(128 << 20, dtype=torch.float32)
    return data.nbytes / best_ms(data.sum, 20)


def peak_rates(threads: int) -> dict[str, float]:
    """Multiply-adds a millisecond in float32 and in int8."""
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(folder) / "peak")
        source = str(Path(__file__).with_name("peak.cpp"))
        subprocess.run(["g++", "-O2", "-march=native", "-pthread", source, "-o", program], check=True)
        done = subprocess.run([program, str(threads)], check=True, capture_output=True, text=True)
    fp32, int8 = (float(rate) * 1e6 for rate in done.stdout.split())
    return {"fp32": fp32, "int8": int8}


def limits() -> Limits:
    return Limits(read_bandwidth(), peak_rates(torch.get_num_threads()))
