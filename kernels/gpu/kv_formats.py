"""How a KV cache on a GPU stores numbers: as they are, or in 8 bits with a float32 scale for each token and head.

A page of one block and one KV head holds its values, [block_size, head_dim], then in 8 bits its block_size scales.
Rounding is that of `kernels.attention.torch_backend`. Triton compiles float8 e4m3 from compute capability 8.9 on;
below, its bits are made and read by arithmetic on whole numbers.
"""

import torch
import triton
import triton.language as tl

from kernels.attention.backend import FP8

PLAIN, INT8, FP8_NATIVE, FP8_BITS = (tl.constexpr(i) for i in range(4))
_TINY = tl.constexpr(1e-30)


def kv_format(stored: torch.dtype, capability: tuple[int, int]) -> int:
    """Which of the formats above a cache of this type has."""
    if stored is torch.int8:
        return int(INT8.value)
    if stored is FP8:
        return int(FP8_NATIVE.value if capability >= (8, 9) else FP8_BITS.value)
    return int(PLAIN.value)


@triton.jit
def largest(format: tl.constexpr):
    """The largest magnitude that the values have."""
    if format == INT8:
        return 127.0
    return 448.0


@triton.jit
def encode(x, format: tl.constexpr):
    """x: float32, scaled -> uint8."""
    if format == INT8:
        # Adding and taking off 1.5 * 2^23 rounds to whole numbers, halves to even.
        shifted = x + 12582912.0
        return shifted.to(tl.int32, bitcast=True).to(tl.uint8)
    if format == FP8_NATIVE:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Above 2^-6: three bits of the mantissa, halves to even, and the exponent's bias 7 in place of 127.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below: multiples of 2^-9, rounded by the same addition as above.
    small = (tl.abs(x) * 512.0 + 12582912.0).to(tl.int32, bitcast=True) & 0xF
    sign = (bits >> 24) & 0x80
    return (tl.where(magnitude < 0x3C800000, small, normal) | sign).to(tl.uint8)


@triton.jit
def decode(x, dtype: tl.constexpr, format: tl.constexpr):
    """What the cache holds -> dtype, before the scale; of FP8_BITS 2^-8 of it (`decoded_scale`)."""
    if format == FP8_NATIVE:
        return x.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(dtype)
    if format == FP8_BITS:
        wide = x.to(tl.int16)
        half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        return half.to(tl.float16, bitcast=True).to(dtype)
    return x.to(dtype)


@triton.jit
def decoded_scale(scale, format: tl.constexpr):
    """The factor that belongs to decoded values."""
    if format == FP8_BITS:
        return scale * 256.0
    return scale


@triton.jit
def inverse_scale(top, format: tl.constexpr):
    """top: largest magnitude of a token and head -> what its values are multiplied by."""
    return tl.where(top > _TINY, tl.div_rn(tl.zeros_like(top) + largest(format), top), 0.0)
