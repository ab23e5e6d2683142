"""How much memory there is, and how many KV blocks it makes."""

import os
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.errors import ConfigError

GIB = 1 << 30
CPU_CACHE_LIMIT = 4 * GIB
CPU_CACHE_SHARE = 0.25
"""Of the available memory, on a CPU: the rest of the machine goes on living there."""


def num_kv_blocks(
    config: EngineConfig, device: torch.device, *, bytes_per_block: int, step_bytes: int, block_size: int
) -> int:
    """Blocks of the KV cache by the settings.

    step_bytes: memory that the largest step needs beside weights and cache. Raises `ConfigError` with the numbers
    when not even one block fits.
    """
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override
    budget = config.kv_cache_memory_bytes
    source = "kv_cache_memory_bytes"
    if budget is None and device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        budget = int(total * config.gpu_memory_utilization) - (total - free) - step_bytes
        source = (
            f"gpu_memory_utilization {config.gpu_memory_utilization:g} of {total / GIB:.1f} GiB, {free / GIB:.1f} free"
        )
    elif budget is None:
        budget = min(CPU_CACHE_LIMIT, int(available_memory() * CPU_CACHE_SHARE))
        source = "a quarter of the available memory"
    blocks = budget // bytes_per_block
    if blocks < 1:
        raise ConfigError(
            f"no KV cache fits: {source} leaves {max(budget, 0) / GIB:.2f} GiB and one block of {block_size} tokens "
            f"takes {bytes_per_block / GIB:.4f} GiB; raise kv_cache_memory_bytes or gpu_memory_utilization, or lower "
            "max_num_batched_tokens"
        )
    return blocks


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
