"""The choice of an attention backend: pure, made once, before the block pool exists."""

import torch

from kernels import cpu_ops
from kernels.attention.backend import FP8, AttentionBackend
from kernels.attention.cpu_backend import CpuBackend
from kernels.attention.torch_backend import TorchBackend

KV_CACHE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8, FP8)


def select_backend(
    device: torch.device | str,
    dtype: torch.dtype,
    head_dim: int,
    block_size: int = 0,
    kv_dtype: torch.dtype | None = None,
) -> AttentionBackend:
    """The fastest backend that can serve this model and block size; its `reason` says why, for one log line.

    block_size: tokens a block, as asked for; 0 leaves it to the backend (`default_block_size`).
    kv_dtype: what the cache stores, one of `KV_CACHE_DTYPES`; None: the model's own type.

    Raises `ValueError` for a block size or a `kv_dtype` that no backend supports.
    """
    if kv_dtype not in (None, *KV_CACHE_DTYPES):
        raise ValueError(f"the KV cache can be float32, bfloat16, float16, int8 or float8_e4m3fn, got {kv_dtype}")
    if block_size < 0:
        raise ValueError(
            f"block_size must be 0 (the backend's choice), a multiple of 16 for the fast CPU backend, or any size from "
            f"1 for the torch backend; got {block_size}"
        )
    device = torch.device(device)
    if device.type != "cpu":
        return TorchBackend(f"no faster backend serves {device.type} yet; every block size is supported", kv_dtype)
    if not CpuBackend.supports_model(dtype, head_dim, kv_dtype):
        return TorchBackend(
            f"the C++ kernels take float32 with a cache of float32, bfloat16 or int8 and a head_dim that is a multiple "
            f"of 16 up to 256, not {dtype} with a cache of {kv_dtype or dtype} and {head_dim}: attention is slow",
            kv_dtype,
        )
    cpu = CpuBackend("C++ kernels for float32", kv_dtype)
    if block_size and not cpu.supports_block_size(block_size):
        return TorchBackend(
            f"the C++ kernels take a block_size that is a multiple of 16, not {block_size}: attention is slow",
            kv_dtype,
        )
    if not cpu_ops.load():
        return TorchBackend("the C++ kernels are not built: attention is slow", kv_dtype)
    return cpu
