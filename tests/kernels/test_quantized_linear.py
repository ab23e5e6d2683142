"""The 8-bit dense layer: its definition against float arithmetic, C++ against the definition."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import linear as torch_linear
from torch.nn.functional import silu

from kernels import cpu_ops, rms_norm
from kernels.quantized_linear import (
    add_quantized_linear,
    norm_quantized_linear,
    quantize,
    quantized_linear,
    reference,
)
from kernels.quantized_weight import GROUP, QuantizedWeight, Rest, quantize_weight
from tests.kernels.weights import q4_1


def weight_of(n, k, gated=False, four_bits=False):
    weight = q4_1(n, k) if four_bits else torch.randn(n, k) * k**-0.5
    quantized = quantize_weight(weight, gated=gated)
    assert (quantized.offset is not None) == four_bits
    return weight, quantized


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


SHAPES = [(48, 64, False), (960, 576, False), (100, 96, False), (2, 2, False), (50, 130, False)]


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("n", "k", "four_bits"), [*SHAPES, (960, 576, True), (100, 96, True)])
@pytest.mark.parametrize("rows", [0, 1, 3, 8, 9, 150])
def test_quantized_linear_equals_reference(isa, rows, n, k, four_bits, gated):
    _, weight = weight_of(n, k, gated, four_bits)
    x, bias = torch.randn(rows, k), torch.randn(n)
    before = x.clone()
    for b in (None, bias):
        close(quantized_linear(x, weight, b), reference(x, weight, b))
    assert torch.equal(x, before)


@pytest.mark.parametrize(("n", "k", "four_bits"), [(576, 576, True), (100, 96, True), (2, 2, False), (50, 130, False)])
@pytest.mark.parametrize("rows", [0, 1, 4, 9, 150, 300])
def test_add_quantized_linear_adds_the_same_bits(isa, rows, n, k, four_bits):
    _, weight = weight_of(n, k, four_bits=four_bits)
    x, total = with_outliers(rows, k) if rows and k > 64 else torch.randn(rows, k), torch.randn(rows, n)
    for bias in (None, torch.randn(n)):
        expected = total + quantized_linear(x, weight, bias)
        add_quantized_linear(total, x, weight, bias)
        assert torch.equal(total, expected)


@pytest.mark.parametrize(("n", "k"), [(960, 576), (100, 96)])
def test_reference_is_within_a_percent_of_float(n, k):
    weight, quantized = weight_of(n, k)
    x, bias = torch.randn(40, k), torch.randn(n)
    expected = torch_linear(x, weight, bias)
    assert (reference(x, quantized, bias) - expected).norm() < 0.01 * expected.norm()


def test_gated_reference_is_swiglu_within_two_percent_of_float():
    weight, quantized = weight_of(200, 96, gated=True)
    x = torch.randn(40, 96)
    gate, up = torch_linear(x, weight).chunk(2, dim=-1)
    expected = silu(gate) * up
    assert (reference(x, quantized) - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize("k", [64, 576, 1536])
@pytest.mark.parametrize("four_bits", [False, True])
def test_reference_multiplies_the_numbers_that_the_bits_stand_for(four_bits, k):
    """But for the part of 4-bit offsets that 8 bits do not hold."""
    _, quantized = weight_of(50, k, four_bits=four_bits)
    x = torch.rand(5, k) + 0.5  # sums of groups are large, and there are no outliers
    values, step = quantize(x.view(5, -1, GROUP))
    stood_for = quantized.rows(torch.arange(50))
    expected = torch_linear((values * step).flatten(1).double(), stood_for.double()).float()
    got = reference(x, quantized)
    if four_bits:
        assert (got - expected).norm() < 0.01 * expected.norm()
    else:
        close(got, expected)


def test_steps_are_powers_of_two_and_no_value_takes_more_than_127():
    tops = torch.cat((torch.rand(100) * 10, torch.tensor([127.0, 127.00001, 126.99999, 254.0, 1e-25, 1e25, 0.0])))
    values, step = quantize(torch.rand(107, GROUP) * 0.5 * tops[:, None])
    assert torch.equal(step, torch.exp2(torch.log2(step).round()))
    values, step = quantize(torch.cat((-tops[:, None], torch.rand(107, GROUP - 1) * tops[:, None]), dim=1))
    assert values.abs().max() == 127
    assert (values[:-1, 0] <= -63).all()
    assert step[-1] == 1


def test_whole_numbers_with_one_scale_come_out_exact(isa):
    """Values from -127 to 127 whose groups all reach 127: neither side rounds, and sums stay under 2^24."""
    g = torch.Generator().manual_seed(0)
    x, w = (torch.randint(-127, 128, (n, 128), generator=g).float() for n in (7, 96))
    x[:, ::GROUP] = 127.0
    w[:, ::GROUP] = -127.0
    assert torch.equal(quantized_linear(x, quantize_weight(w)), torch_linear(x.double(), w.double()).float())


def with_outliers(rows, k):
    """One channel loud in every row, others in some, and a last row where there are more than it has room for."""
    x = torch.randn(rows, k)
    x[:, 5] = 50
    x[::3, 40:44] *= 20
    x[1::4, k - 1] *= 30
    x[-1, : k // 8] *= 100
    return x


@pytest.mark.parametrize("four_bits", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [1, 4, 7, 150])
def test_outliers_equal_reference(isa, rows, gated, four_bits):
    _, weight = weight_of(100, 576, gated, four_bits)
    x = with_outliers(rows, 576)
    expected = reference(x, weight)
    torch.testing.assert_close(
        quantized_linear(x, weight), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max())
    )


@pytest.mark.parametrize("gated", [False, True])
def test_rows_whose_outliers_share_no_dimensions(isa, gated):
    """More dimensions in a block than there is room for decoded weights: rows decode their own, to the same bits."""
    _, weight = weight_of(100, 1536, gated, four_bits=True)
    x = torch.randn(128, 1536)
    x.view(128, 128, 12).diagonal().mul_(30)
    together = quantized_linear(x, weight)
    expected = reference(x, weight)
    torch.testing.assert_close(together, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    for row in (0, 77, 127):
        assert torch.equal(quantized_linear(x[row : row + 1], weight), together[row : row + 1])
        assert torch.equal(quantized_linear(x[row : row + 2], weight), together[row : row + 2])


def test_outliers_take_no_precision_from_the_other_channels(isa):
    weight, quantized = weight_of(100, 576, four_bits=True)
    x = with_outliers(9, 576)[:-1]
    loud = x.abs() > 8
    assert loud.any(1).all()
    alone = torch_linear(x.where(loud, torch.zeros(())).double(), weight.double()).float()
    others = quantized_linear(x, quantized) - alone
    expected = torch_linear(x.masked_fill(loud, 0.0), weight)
    assert (others - expected).norm() < 0.012 * expected.norm()


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 4, 5, 40])
def test_norm_quantized_linear_equals_its_parts(isa, rows, gated, residual):
    _, weight = weight_of(100, 130, gated)
    x, norm, bias = torch.randn(rows, 130), torch.rand(130), torch.randn(100)
    added = torch.randn(rows, 130) if residual else None
    y, total = norm_quantized_linear(x, added, norm, 1e-5, weight, bias)
    assert torch.equal(total, x if added is None else added + x)
    close(y, quantized_linear(rms_norm.rms_norm(total, norm, 1e-5), weight, bias))
    if rows:  # float32 rounding of the norm may move a value over the edge between two whole numbers
        expected = reference(rms_norm.reference(total, norm, 1e-5), weight, bias)
        assert (y - expected).norm() < 0.002 * expected.norm()


@pytest.mark.parametrize("four_bits", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_a_row_gets_the_same_bits_in_every_batch(isa, gated, four_bits):
    _, weight = weight_of(200, 576, gated, four_bits)
    x, norm = with_outliers(300, 576), torch.rand(576)
    together = quantized_linear(x, weight)
    normed, _ = norm_quantized_linear(x, x, norm, 1e-5, weight)
    for rows in (1, 2, 3, 4, 5, 7, 13, 32, 129):
        assert torch.equal(quantized_linear(x[:rows], weight), together[:rows])
        assert torch.equal(norm_quantized_linear(x[:rows], x[:rows], norm, 1e-5, weight)[0], normed[:rows])
    assert torch.equal(quantized_linear(x[31:32], weight), together[31:32])


@pytest.mark.parametrize("four_bits", [False, True])
@pytest.mark.parametrize("rows", [1, 4, 5, 300])
@pytest.mark.parametrize("threads", [1, 3])
def test_thread_count_does_not_change_the_bits(threads, rows, four_bits):
    _, weight = weight_of(1000, 576, four_bits=four_bits)
    x, norm = with_outliers(rows, 576), torch.rand(576)
    expected = norm_quantized_linear(x, x, norm, 1e-5, weight)
    usual = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for got, wanted in zip(norm_quantized_linear(x, x, norm, 1e-5, weight), expected, strict=True):
            assert torch.equal(got, wanted)
    finally:
        torch.set_num_threads(usual)


@pytest.mark.parametrize("four_bits", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_number_is_not_lost_and_stays_in_its_row(isa, bad, four_bits):
    _, weight = weight_of(60, 96, four_bits=four_bits)
    x = torch.randn(9, 96)
    clean = quantized_linear(x, weight)
    x[4, 50] = bad
    dirty = quantized_linear(x, weight)
    assert not dirty[4].isfinite().any()
    others = torch.arange(9) != 4
    assert torch.equal(dirty[others], clean[others])


@pytest.mark.parametrize("four_bits", [False, True])
def test_zeros_and_the_smallest_numbers_give_zero_not_nan(isa, four_bits):
    _, weight = weight_of(60, 96, four_bits=four_bits)
    x = torch.zeros(3, 96)
    x[1] = 1e-38
    x[2] = 1e-45
    assert not quantized_linear(x, weight).any()
    assert not quantized_linear(torch.ones(1, 96), quantize_weight(torch.zeros(60, 96))).any()


def test_linear_takes_rows_with_a_stride_and_more_dimensions(isa):
    _, weight = weight_of(60, 64)
    x = torch.randn(4, 5, 100)
    close(quantized_linear(x[..., :64], weight), reference(x[..., :64], weight))
    close(quantized_linear(x[0, :, 30:94], weight), reference(x[0, :, 30:94], weight))


def test_rows_are_the_weight_within_half_a_step():
    weight, quantized = weight_of(100, 130)
    index = torch.tensor([99, 0, 47, 48])
    step = weight.abs().amax(1, keepdim=True) / 127
    assert ((quantized.rows(index) - weight[index]).abs() <= 0.51 * step[index]).all()


def test_a_quantized_weight_takes_little_over_a_quarter():
    _, weight = weight_of(960, 576)
    assert weight.data.nbytes + weight.scale.nbytes < 0.27 * 960 * 576 * 4


def test_wrong_shapes_are_refused():
    assert cpu_ops.load()
    _, weight = weight_of(50, 64)
    with pytest.raises(ValueError, match=r"k up to 64 and above 32"):
        quantized_linear(torch.zeros(2, 65), weight)
    with pytest.raises(ValueError, match=r"bias must be \[50\]"):
        quantized_linear(torch.zeros(2, 64), weight, torch.zeros(49))
    with pytest.raises(ValueError, match="quantized weight of 500"):
        quantized_linear(torch.zeros(2, 64), QuantizedWeight(weight.data, weight.scale, None, 500, 64, False))
    with pytest.raises(ValueError, match="scale of a quantized weight"):
        quantized_linear(torch.zeros(2, 64), QuantizedWeight(weight.data, weight.scale[:1], None, 50, 64, False))
    _, four_bits = weight_of(50, 64, four_bits=True)
    wrong = replace(four_bits, rest=Rest(four_bits.rest.data[:, :-1].contiguous()))
    with pytest.raises(ValueError, match="rest of a quantized weight"):
        quantized_linear(torch.zeros(2, 64), wrong)
    with pytest.raises(ValueError, match="k up to 32"):
        quantized_linear(torch.zeros(2, 64), replace(four_bits, rest=None))
    with pytest.raises(ValueError, match=r"sum must be contiguous \[rows, 50\]"):
        add_quantized_linear(torch.zeros(3, 50), torch.zeros(2, 64), weight)
    with pytest.raises(ValueError, match=r"sum must be contiguous"):
        add_quantized_linear(torch.zeros(2, 100)[:, :50], torch.zeros(2, 64), weight)
    with pytest.raises(ValueError, match="one shape"):
        norm_quantized_linear(torch.zeros(2, 64), torch.zeros(3, 64), torch.ones(64), 1e-5, weight)
    with pytest.raises(ValueError, match=r"weight must be \[64\]"):
        norm_quantized_linear(torch.zeros(2, 64), None, torch.ones(63), 1e-5, weight)
