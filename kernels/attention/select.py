"""The choice of an attention backend: pure, made once, before the block pool exists."""

import functools
import importlib
import logging
from collections.abc import Collection

import torch

from kernels import cpu_ops
from kernels.attention.backend import FP8, AttentionBackend
from kernels.attention.cpu_backend import CpuBackend
from kernels.attention.flash_backend import FLASH_2, FLASH_3, Flash2Backend, Flash3Backend
from kernels.attention.torch_backend import TorchBackend
from kernels.attention.triton_backend import TritonBackend
from kernels.gpu import Gpu, describe

logger = logging.getLogger(__name__)

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
    if device.type == "cuda":
        return select_gpu_backend(describe(device), installed(), dtype, head_dim, block_size, kv_dtype)
    if device.type != "cpu":
        return TorchBackend(f"no faster backend serves {device.type}; every block size is supported", kv_dtype)
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


def select_gpu_backend(
    gpu: Gpu,
    packages: Collection[str],
    dtype: torch.dtype,
    head_dim: int,
    block_size: int = 0,
    kv_dtype: torch.dtype | None = None,
) -> AttentionBackend:
    """`select_backend` for a card and what can be imported of triton, flash_attn and flash_attn_interface."""
    capability = gpu.capability
    card = f"compute capability {capability[0]}.{capability[1]}"
    if "triton" not in packages:
        return TorchBackend("triton is not installed: attention is slow", kv_dtype)
    if (
        FLASH_3 in packages
        and Flash3Backend.supports_model(capability, dtype, head_dim, kv_dtype)
        and block_size % Flash3Backend.page == 0
    ):
        return Flash3Backend(f"{FLASH_3} is installed and made for {card}", kv_dtype)
    if (
        FLASH_2 in packages
        and block_size
        and block_size % Flash2Backend.page == 0
        and Flash2Backend.supports_model(capability, dtype, head_dim, kv_dtype)
    ):
        return Flash2Backend(f"{FLASH_2} is installed and takes blocks of {block_size}", kv_dtype)
    triton = TritonBackend(f"the default on {card}", kv_dtype, gpu=gpu)
    if not triton.supports_model(capability, dtype, head_dim, kv_dtype):
        return TorchBackend(
            "the Triton kernels take float32, bfloat16 or float16, a head_dim that is a multiple of 16 up to 256 and "
            f"cards from compute capability 7.5 on, not {dtype}, {head_dim} and {card}: attention is slow",
            kv_dtype,
        )
    if block_size and not triton.supports_block_size(block_size):
        return TorchBackend(
            f"the Triton kernels take a block_size that is a multiple of 16, not {block_size}: attention is slow",
            kv_dtype,
        )
    return triton


@functools.cache
def installed() -> frozenset[str]:
    """Which of the packages that serve a GPU can be imported here."""
    found = set()
    for name in ("triton", FLASH_2, FLASH_3):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        except Exception as error:  # built for another torch, or for another CUDA
            logger.warning("%s is installed but cannot be imported, so it is not used: %s", name, error)
            continue
        found.add(name)
    return frozenset(found)
