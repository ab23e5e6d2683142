"""Whether a model's heads can be shared by so many ranks. No torch: it is asked before any rank is started."""

from engine.errors import ConfigError
from engine.model_config import ModelConfig


def heads_problem(config: ModelConfig, size: int) -> str | None:
    """Why `size` ranks cannot share the attention heads evenly, or None."""
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if heads % size:
        return f"the model has {heads} attention heads, which cannot be shared evenly by {size} ranks"
    if kv_heads % size and size % kv_heads:
        return f"the model has {kv_heads} KV heads, of which {size} ranks can neither have as many each, nor one each"
    return None


def check_heads(config: ModelConfig, size: int) -> None:
    """Raise `ConfigError` if the heads cannot be shared, before `size` processes have loaded anything."""
    if problem := heads_problem(config, size):
        sizes = ", ".join(str(n) for n in range(1, config.num_heads + 1) if heads_problem(config, n) is None)
        raise ConfigError(f"tensor_parallel_size is {size}, but {problem}; its heads can be shared by {sizes}")
