"""The Triton kernels with the functions that launch them, one operation a module.

No module of this package is imported before a tensor lies on a GPU: on a CPU Triton costs its import and does nothing.
Each kernel has its definition in the module of its operation (`kernels.rms_norm.reference` and so on).
"""

import functools
import importlib.util
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Gpu:
    """What the choice of kernels and tiles must know of a card.

    capability: compute capability, (9, 0) for a Hopper card. multiprocessors: how many it has.
    """

    capability: tuple[int, int]
    multiprocessors: int


@functools.cache
def available() -> bool:
    return importlib.util.find_spec("triton") is not None


def usable(x: Tensor) -> bool:
    """Not under torch.compile, which fuses the plain forms by itself."""
    return x.is_cuda and not torch.compiler.is_compiling() and available()


@functools.cache
def describe(device: torch.device) -> Gpu:
    properties = torch.cuda.get_device_properties(device)
    return Gpu((properties.major, properties.minor), properties.multi_processor_count)
