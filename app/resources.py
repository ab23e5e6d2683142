"""What to ask Ray for: GPUs, and what one shard takes."""

import ray

from engine.errors import ConfigError

SHARD_CPUS = 0.2
"""Share of a core that a shard's bundle asks for: four find a place on one. The ranks set their threads themselves."""


def shard_bundle(num_gpus: int) -> dict[str, float]:
    """What one shard asks of its placement group."""
    return {"CPU": SHARD_CPUS, "GPU": num_gpus} if num_gpus else {"CPU": SHARD_CPUS}


def gpus_to_ask_for(device: str, count: int = 1) -> int:
    """`count` where there are GPUs and the engine may use them. Asking for one that is not there would wait for ever.

    Raises `ConfigError` if GPUs are demanded and there is none, or where there are some, but fewer.
    """
    if device == "cpu":
        return 0
    found = _count_gpus()
    if device == "cuda" and not found:
        raise ConfigError("device is cuda, but there is no GPU here: use device=auto or device=cpu")
    if 0 < found < count:
        raise ConfigError(
            f"tensor_parallel_size is {count}, but there are {found} GPUs: lower it, or use device=cpu"
            if found > 1
            else f"tensor_parallel_size is {count}, but there is one GPU: lower it, or use device=cpu"
        )
    return count if found else 0


def _count_gpus() -> int:
    """Of the cluster if one is connected, else of this machine, counted as Ray will count them. No torch needed."""
    if ray.is_initialized():
        return int(ray.cluster_resources().get("GPU", 0))
    from ray._private.accelerators import NvidiaGPUAcceleratorManager

    visible = NvidiaGPUAcceleratorManager.get_current_process_visible_accelerator_ids()
    count: int = NvidiaGPUAcceleratorManager.get_current_node_num_accelerators()
    return count if visible is None else min(count, len(visible))
