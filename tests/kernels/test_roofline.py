"""Bytes and operations of the GPU kernels against numbers worked out by hand."""

import pytest

from kernels.gpu import roofline
from kernels.gpu.roofline import Work


def test_elementwise_kernels_count_each_number_once():
    # 2 rows of 8 in 2 bytes: x, residual, norm and sum, and the weight.
    assert roofline.add_rms_norm(2, 8, 2) == Work(4 * 32 + 16, 80)
    assert roofline.silu_and_mul(2, 8, 2) == Work(96, 80)
    # One token, 4 + 2 * 2 heads of 16 in 2 bytes: 256 in, 64 of cos and sin, 128 of q out, 128 of KV.
    assert roofline.rotary_write(1, 4, 2, 16, 2, 128) == Work(256 + 64 + 128 + 128, 576)


def test_adapters_are_read_once_each_however_many_tokens_have_them():
    # x of 8, y of 6 in two parts, read and written; ranks of 4 of both parts, and of 6 columns.
    assert roofline.add_lora(10, 2, 8, 6, 2, 4, 2) == Work((10 * 20 + 2 * 4 * 22) * 2, 2 * 10 * 4 * 22)


def test_the_matrices_of_chosen_experts_are_read_once():
    # 4 tokens of 8 in and out, 3 experts of 3 matrices of 8 x 6, 2 of them for each token.
    assert roofline.experts_mlp(4, 3, 2, 8, 6, 2) == Work((64 + 3 * 144) * 2, 2 * 4 * 2 * 144)


def test_a_decode_reads_its_context_and_a_prompt_reads_itself_once():
    # 10 tokens of 128 bytes, and q and out: 4 heads of 16 in 2 bytes.
    assert roofline.attention([10], [1], 4, 16, 2, 128) == Work(10 * 128 + 256, 4 * 10 * 64)
    # 3 queries see 1, 2 and 3 tokens.
    assert roofline.attention([3], [3], 4, 16, 2, 128) == Work(3 * 128 + 3 * 256, 4 * 6 * 64)
    assert roofline.attention([10, 3, 5], [1, 3, 0], 4, 16, 2, 128) == Work(13 * 128 + 4 * 256, 4 * 16 * 64)


def test_a_window_bounds_what_is_read_and_computed():
    assert roofline.attention([100], [1], 4, 16, 2, 128, window=8) == Work(8 * 128 + 256, 4 * 8 * 64)
    # Queries at 98 and 99 see tokens 91 to 98 and 92 to 99.
    assert roofline.attention([100], [2], 4, 16, 2, 128, window=8) == Work(9 * 128 + 512, 4 * 16 * 64)


def test_the_sampler_reads_its_logits():
    assert roofline.sample(2, 1000, False) == Work(8000, 6000)
    assert roofline.sample(2, 1000, True) == Work(24_000, 6000)


def test_the_floor_is_the_slower_of_memory_and_arithmetic():
    assert Work(4_800_000, 1).floor_us(4800, 900) == pytest.approx(1.0)
    assert Work(1, 1_800_000_000).floor_us(4800, 900) == pytest.approx(2.0)
