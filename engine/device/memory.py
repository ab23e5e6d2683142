"""How much memory there is, and how many KV blocks it makes. Arithmetic; what a step needs is measured elsewhere."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.errors import ConfigError

GIB = 1 << 30
CPU_CACHE_LIMIT = 4 * GIB
CPU_CACHE_SHARE = 0.25
"""Of the available memory, on a CPU: the rest of the machine goes on living there."""

BYTES_PER_GRAPH = 2 << 20
"""Of a captured CUDA graph, beside the pool that all share: what the driver keeps for some hundreds of kernels."""


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """A GPU's memory with the weights loaded, in bytes.

    free: of total, as the driver tells it; what others have taken counts as ours.
    step: what the largest step takes beside weights and cache. decode: what the largest decode step takes of that.
    """

    total: int
    free: int
    step: int
    decode: int

    def graphs(self, num_graphs: int) -> int:
        """What captured graphs will take: one pool of the largest decode step, and each graph itself."""
        return num_graphs and self.decode + num_graphs * BYTES_PER_GRAPH

    def for_cache(self, utilization: float, num_graphs: int) -> int:
        """What is left for the KV cache when `utilization` of the total may be used; less than 0 if it does not fit."""
        return int(self.total * utilization) - (self.total - self.free) - self.step - self.graphs(num_graphs)

    def account(self, utilization: float, num_graphs: int) -> str:
        """The sum in words, for logs and errors."""
        parts = f"{(self.total - self.free) / GIB:.2f} GiB in use with the weights, {self.step / GIB:.2f} for a step"
        if num_graphs:
            parts += f", {self.graphs(num_graphs) / GIB:.2f} for {num_graphs} CUDA graphs"
        return f"of {self.total / GIB:.2f} GiB gpu_memory_utilization {utilization:g} allows {parts}"


def num_kv_blocks(
    config: EngineConfig, gpu: GpuMemory | None, num_graphs: int, bytes_per_block: int, ranks: int = 1
) -> int:
    """Blocks of the KV cache by the settings. gpu: None on a CPU. ranks: that share the memory of this host.

    Raises `ConfigError` with the numbers, and with the settings to change, when not even one block fits.
    """
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override
    if config.kv_cache_memory_bytes is not None:
        budget = config.kv_cache_memory_bytes
        source = f"kv_cache_memory_bytes is {budget}"
        change = "raise kv_cache_memory_bytes"
    elif gpu is not None:
        budget = gpu.for_cache(config.gpu_memory_utilization, num_graphs)
        source = gpu.account(config.gpu_memory_utilization, num_graphs)
        change = "raise gpu_memory_utilization, lower max_num_batched_tokens or max_num_seqs"
        change += ", or set enforce_eager" if num_graphs else ""
    else:
        budget = min(CPU_CACHE_LIMIT, int(available_memory() * CPU_CACHE_SHARE)) // ranks
        source = "a quarter of the available memory is taken" + (f" by {ranks} ranks" if ranks > 1 else "")
        change = "free memory, or set kv_cache_memory_bytes"
    blocks = budget // bytes_per_block
    if blocks < 1:
        raise ConfigError(
            f"no KV cache fits: {source}; that leaves {budget / GIB:.2f} GiB, and one block takes "
            f"{bytes_per_block / GIB:.4f} GiB; {change}"
        )
    return blocks


def out_of_memory(what: str, change: str, device: torch.device) -> ConfigError:
    """The error for `what` having found no room on a GPU at start."""
    free, total = torch.cuda.mem_get_info(device)
    return ConfigError(
        f"{what} not fit the GPU: {free / GIB:.2f} GiB of {total / GIB:.2f} GiB are free; {change}",
    )


def available_memory() -> int:
    """Bytes that this process may still take, by the machine and by its control group."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    group = Path("/sys/fs/cgroup")
    limit, used = group / "memory.max", group / "memory.current"
    if limit.exists() and used.exists() and limit.read_text().strip() != "max":
        available = min(available, int(limit.read_text()) - int(used.read_text()))
    return max(available, 0)
