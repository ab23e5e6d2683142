"""Compiles what the launchers of `kernels.gpu` would launch, for a card that is not there, and reads the result.

A stand-in for Triton's driver names the card; a launch is compiled with Triton's own specialisation of its arguments
and not run. Nothing here needs a GPU.
"""

import ast
import contextlib
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from kernels import gpu
from kernels.attention import AttentionMetadata, HeadNorms
from kernels.attention.backend import FP8
from kernels.attention.triton_backend import TritonBackend
from kernels.gpu import Gpu, activation, experts, logits, lora, norm, sampler
from kernels.lora import LoraTokens, lora_weights

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CAPABILITIES = ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))


@dataclass(frozen=True)
class Compiled:
    """One kernel for one card. shared: bytes a block takes, static and dynamic. stack: bytes a thread spills to.

    tensor_cores: the instruction that uses them, wgmma of cc 9.0, tcgen05 of 10.0 or mma, or none.
    """

    name: str
    registers: int
    stack: int
    shared: int
    tensor_cores: str
    async_copies: bool


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
    ptx = kernel.asm["ptx"]
    return Compiled(
        name=kernel.metadata.name,
        registers=registers,
        stack=stack,
        shared=static + kernel.metadata.shared,
        tensor_cores=next((name for name in ("wgmma", "tcgen05.mma", "mma.sync") if name in ptx), ""),
        async_copies="cp.async" in ptx,
    )


SHARED_MEMORY = {75: 65_536, 80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
"""Bytes of shared memory that one block may have, by compute capability."""


def shared_memory(capability: tuple[int, int]) -> int:
    return SHARED_MEMORY[capability[0] * 10 + capability[1]]


KERNELS = {
    "_norm_kernel",
    "_gated_kernel",
    "_bitmask_kernel",
    "_penalise_kernel",
    "_rotary_write_kernel",
    "_attention_kernel",
    "_merge_kernel",
    "_threshold_kernel",
    "_chunk_kernel",
    "_best_kernel",
    "_draw_kernel",
    "_logprob_kernel",
    "_lora_low_kernel",
    "_lora_high_kernel",
    "_sort_kernel",
    "_gate_up_kernel",
    "_down_kernel",
}
TENSOR_CORES = {"_sort_kernel", "_gate_up_kernel", "_down_kernel"}
"""Kernels that are used where Triton has tensor cores alone."""


def launched_kernels() -> set[str]:
    """What the sources of `kernels/gpu` launch: `kernel[grid](...)`."""
    trees = [ast.parse(file.read_text()) for file in Path(gpu.__file__).parent.glob("*.py")]
    calls = [node.func for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return {call.value.id for call in calls if isinstance(call, ast.Subscript) and isinstance(call.value, ast.Name)}


def compile_all(capability: tuple[int, int]) -> dict[str, list[Compiled]]:
    """Case -> what it launches."""
    done = {}
    for case, launch in _cases(capability).items():
        with compiled_launches(capability) as found:
            launch()
        done[case] = found
    return done


def _cases(capability: tuple[int, int]) -> dict[str, Callable[[], object]]:
    """Each case's launches: every kernel for every card, and each further form where cards or formats differ.

    Prompts run in Triton on cards with tensor cores that it can use. Compilation takes a second a launch, so cards that
    share their tiles share the forms.
    """
    dtype = BF16 if capability >= (8, 0) else FP16
    cases: dict[str, Callable[[], object]] = {
        "norm": lambda: norm.add_rms_norm(*(torch.zeros(4, 4096, dtype=dtype),) * 2, torch.zeros(4096, dtype=dtype), 1),
        "silu": lambda: activation.silu_and_mul(torch.zeros(4, 6144, dtype=dtype)),
        "bitmask": lambda: logits.apply_bitmask(
            torch.zeros(2, 151_936), torch.zeros(2, 4748, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
        ),
        "penalties": _penalise,
        "sampler": _sample,
        "lora": lambda: _add_lora(dtype, 16, (2048, 512, 512)),
        "write fp8": lambda: _write(capability, dtype, FP8),
        "decode": lambda: _attend(capability, dtype, None, 16, 8, 128, 256, 1, 1024),
        "decode int8 split": lambda: _attend(capability, dtype, torch.int8, 32, 4, 128, 8, 1, 8192),
    }
    if capability < (8, 0):
        cases |= {
            "write bfloat16": lambda: _write(capability, BF16, FP8),
            "decode bfloat16 fp8": lambda: _attend(capability, BF16, FP8, 32, 4, 128, 256, 1, 1024),
        }
        return cases
    cases |= {
        "prompt": lambda: _attend(capability, dtype, None, 16, 8, 128, 4, 512, 1024),
        "experts": lambda: _experts(capability, dtype, 64),
        "experts prompt": lambda: _experts(capability, dtype, 8192),
        "prompt 256 window cap": lambda: _attend(capability, dtype, None, 8, 4, 256, 16, 512, 1024, 512, 50.0),
    }
    if capability in ((8, 6), (8, 9), (9, 0)):  # fp8 by whole numbers, and natively
        cases |= {
            "decode fp8": lambda: _attend(capability, dtype, FP8, 32, 4, 128, 256, 1, 1024),
            "prompt fp8": lambda: _attend(capability, dtype, FP8, 16, 8, 128, 4, 512, 1024),
        }
    if capability in ((8, 0), (9, 0), (12, 0)):
        cases |= {
            "decode 256": lambda: _attend(capability, dtype, None, 8, 4, 256, 256, 1, 1024),
            "prompt float32": lambda: _attend(capability, FP32, None, 16, 8, 64, 4, 512, 1024),
            "experts float32": lambda: _experts(capability, FP32, 64),
        }
    if capability == (9, 0):
        cases |= {
            "lora float32": lambda: _add_lora(FP32, 64, (4096,)),
            "write": lambda: _write(capability, dtype, None),
            "write int8": lambda: _write(capability, dtype, torch.int8),
            "few": lambda: _attend(capability, dtype, None, 16, 8, 128, 256, 4, 1024),
        }
    return cases


def _penalise() -> None:
    seen = torch.zeros(2, 151_936, dtype=torch.int32)
    ids = torch.zeros(2, dtype=torch.int64)
    logits.penalise_rows(torch.zeros(2, 151_936), ids, seen, ids, torch.zeros(2, 3))


def _add_lora(dtype: torch.dtype, rank: int, parts: tuple[int, ...]) -> None:
    weights = lora_weights(2, rank, 2048, parts, dtype=dtype, device=torch.device("cpu"))
    tokens = LoraTokens(torch.zeros(20, dtype=torch.int32), torch.zeros(2, 3, dtype=torch.int32))
    lora.add_lora(torch.zeros(20, sum(parts), dtype=dtype), torch.zeros(20, 2048, dtype=dtype), weights, tokens)


def _experts(capability: tuple[int, int], dtype: torch.dtype, tokens: int) -> None:
    gate_up, down = torch.zeros(64, 2 * 768, 2048, dtype=dtype), torch.zeros(64, 2048, 768, dtype=dtype)
    chosen, weights = torch.zeros(tokens, 8, dtype=torch.int64), torch.zeros(tokens, 8, dtype=dtype)
    x = torch.zeros(tokens, 2048, dtype=dtype)
    experts.experts_mlp(x, gate_up, down, chosen, weights, False, Gpu(capability, 100))


def _sample() -> None:
    values, rows = torch.zeros(8, 151_936), torch.arange(8)
    numbers = torch.ones(8)
    sampler.argmax(values)
    sampler.choose(values, rows, numbers, rows, rows, None)
    sampler.choose(values, rows, numbers, rows, rows, (rows.int(), numbers, numbers))
    sampler.token_logprobs(values, rows, 5)


def _write(capability: tuple[int, int], dtype: torch.dtype, stored: torch.dtype | None) -> None:
    backend = TritonBackend(gpu=Gpu(capability, 100), kv_dtype=stored)
    q, k, v = torch.zeros(8, 32, 128, dtype=dtype).split((16, 8, 8), dim=1)
    caches = backend.kv_cache(4, 16, 8, 128, dtype, "cpu")
    weight, ids, table = torch.ones(128, dtype=dtype), torch.arange(8), torch.ones(8, 64)
    backend.norm_rotary_write(q, k, v, HeadNorms(weight, weight, 1e-6), table, table, ids, *caches, ids)


def _attend(
    capability: tuple[int, int],
    dtype: torch.dtype,
    stored: torch.dtype | None,
    heads: int,
    kv_heads: int,
    head_dim: int,
    sequences: int,
    queries: int,
    length: int,
    window: int = 0,
    soft_cap: float = 0.0,
) -> None:
    backend = TritonBackend(gpu=Gpu(capability, 100), kv_dtype=stored)
    tokens = sequences * queries
    metadata = AttentionMetadata(
        query_start=torch.arange(sequences + 1, dtype=torch.int32) * queries,
        seq_lens=torch.full((sequences,), length, dtype=torch.int32),
        block_tables=torch.zeros(sequences, length // 16, dtype=torch.int32),
        rows=torch.arange(sequences, dtype=torch.int32),
        slots=torch.zeros(tokens, dtype=torch.int64),
        max_query_len=queries,
        max_seq_len=length,
    )
    caches = backend.kv_cache(4, 16, kv_heads, head_dim, dtype, "cpu")
    backend.attend(torch.zeros(tokens, heads, head_dim, dtype=dtype), *caches, metadata, 1.0, window, soft_cap)
