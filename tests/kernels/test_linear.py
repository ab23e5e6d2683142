"""The packed dense layer against F.linear, in both storage types."""

import math

import pytest
import torch
from torch.nn.functional import linear as torch_linear
from torch.nn.functional import pad

from kernels import activation, cpu_ops, rms_norm
from kernels.linear import PackedWeight, add_norm_linear, linear, pack_weight, packs, ungated_linear
from kernels.quantized_weight import PANEL, QuantizedWeight, UnfitWeightError
from tests.kernels.weights import q4_1, q8_0

GGUF = {"q4_1": q4_1, "q8_0": q8_0}


def weight_of(n, k, stored):
    if stored in GGUF:
        return GGUF[stored](n, k)
    weight = torch.randn(n, k) * k**-0.5
    return weight.bfloat16().float() if stored is torch.bfloat16 else weight


def packed(weight):
    result = pack_weight(weight)
    assert isinstance(result, PackedWeight)
    return result


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "k"), [(48, 64), (960, 576), (100, 96), (1, 2), (49, 130)])
@pytest.mark.parametrize("rows", [0, 1, 3, 8, 9, 19, 150])
def test_linear_equals_torch(isa, rows, n, k, stored):
    weight, x, bias = weight_of(n, k, stored), torch.randn(rows, k), torch.randn(n)
    before = x.clone()
    pack = packed(weight)
    assert pack.data.dtype is stored
    for b in (None, bias):
        expected = torch_linear(x.double(), weight.double(), None if b is None else b.double()).float()
        torch.testing.assert_close(linear(x, pack, b), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(x, before)


def test_an_odd_depth_stays_float32(isa):
    for k in (7, 97):
        weight, x, residual, norm = (
            weight_of(50, k, torch.bfloat16),
            torch.randn(5, k),
            torch.randn(5, k),
            torch.randn(k),
        )
        pack = packed(weight)
        assert pack.data.dtype is torch.float32
        torch.testing.assert_close(linear(x, pack), torch_linear(x, weight))
        normed, total = rms_norm.add_rms_norm(x, residual, norm, 1e-5)
        got = add_norm_linear(x, residual, norm, 1e-5, pack)
        assert all(map(torch.equal, got, (linear(normed, pack), total)))


@pytest.mark.parametrize("stored", GGUF)
@pytest.mark.parametrize(("n", "k"), [(48, 64), (960, 576), (100, 96)])
@pytest.mark.parametrize("rows", [0, 1, 3, 8, 9, 19, 150])
def test_codes_give_the_bits_that_their_values_in_float32_give(isa, rows, n, k, stored):
    weight, x, bias = weight_of(n, k, stored), torch.randn(rows, k), torch.randn(n)
    pack = packed(weight)
    assert isinstance(pack.data, QuantizedWeight)
    wide = PackedWeight(panels_of(weight), n, k)
    for b in (None, bias):
        assert torch.equal(linear(x, pack, b), linear(x, wide, b))


def panels_of(weight):
    n, k = weight.shape
    return pad(weight, (0, 0, 0, -n % PANEL)).view(-1, PANEL, k).transpose(1, 2).contiguous()


@pytest.mark.parametrize("rows", [1, 9, 200, 500])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, *GGUF])
def test_thread_count_does_not_change_the_bits(threads, rows, stored):
    pack, x = packed(weight_of(1000, 576, stored)), torch.randn(rows, 576)
    residual, norm = torch.randn(rows, 576), torch.randn(576)
    expected = linear(x, pack), *add_norm_linear(x, residual, norm, 1e-5, pack)
    usual = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        got = linear(x, pack), *add_norm_linear(x, residual, norm, 1e-5, pack)
    finally:
        torch.set_num_threads(usual)
    assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_packing_loses_nothing(stored):
    weight = weight_of(100, 64, stored)
    assert torch.equal(packed(weight).unpack(), weight)


def test_a_weight_that_bfloat16_would_round_is_kept_in_float32():
    weight = weight_of(48, 64, torch.bfloat16)
    weight[47, 63] += 1e-4
    assert packed(weight).data.dtype is torch.float32


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, *GGUF])
def test_a_row_gets_the_same_bits_in_every_batch(isa, stored):
    pack, x = packed(weight_of(100, 576, stored)), torch.randn(300, 576)
    together = linear(x, pack)
    for rows in (1, 2, 4, 5, 7, 8, 13, 33, 129):
        assert torch.equal(linear(x[:rows], pack), together[:rows])


def test_linear_takes_rows_with_a_stride_and_more_dimensions(isa):
    weight = weight_of(60, 64, torch.float32)
    pack, x = packed(weight), torch.randn(4, 5, 100)
    torch.testing.assert_close(linear(x[..., :64], pack), torch_linear(x[..., :64], weight), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(linear(x[0, :, 30:94], pack), torch_linear(x[0, :, 30:94], weight), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_layers_of_half_types_have_no_packed_form(dtype):
    assert not packs(dtype, torch.device("cpu"))
    weight, x = torch.randn(8, 4).to(dtype), torch.randn(3, 4).to(dtype)
    assert torch.equal(linear(x, weight), torch_linear(x, weight))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16, *GGUF])
def test_parts_are_packed_as_one_matrix(stored):
    """Their borders lie within panels, and their type is the checkpoint's."""
    parts = [weight_of(rows, 96, stored) for rows in (100, 1, 30, 48 * 40)]
    if not isinstance(stored, str):
        parts = [part.to(stored) for part in parts]
    pack, whole = pack_weight(*parts), pack_weight(torch.cat(parts).float())
    if isinstance(pack.data, QuantizedWeight):
        assert all(torch.equal(getattr(pack.data, name), getattr(whole.data, name)) for name in ("data", "scale"))
    else:
        assert pack.data.dtype is (torch.bfloat16 if stored is torch.bfloat16 else torch.float32)
        assert torch.equal(pack.data, whole.data)
    assert torch.equal(pack.unpack(), torch.cat(parts).float())


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, *GGUF])
@pytest.mark.parametrize("inner", [1, 48, 101])
@pytest.mark.parametrize("rows", [0, 1, 7, 150])
def test_a_gated_weight_gives_swiglu_of_its_product(isa, rows, inner, stored):
    weight, x, bias = weight_of(2 * inner, 96, stored), torch.randn(rows, 96), torch.randn(2 * inner)
    pack = pack_weight(*weight.chunk(2), gated=True)
    assert isinstance(pack.data, QuantizedWeight) == isinstance(stored, str)
    plain = packed(weight)
    for b in (None, bias):
        assert torch.equal(ungated_linear(x, pack, b), linear(x, plain, b))
        # To the bit: a step in which some request has an adapter does it in two.
        assert torch.equal(linear(x, pack, b), activation.silu_and_mul(ungated_linear(x, pack, b)))
        expected = activation.reference(linear(x, plain, b))
        torch.testing.assert_close(linear(x, pack, b), expected, rtol=3e-6, atol=1e-6)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, *GGUF])
def test_a_gated_weight_gives_a_row_the_same_bits_in_every_batch(isa, stored):
    pack, x = pack_weight(weight_of(200, 96, stored), gated=True), torch.randn(300, 96)
    together = linear(x, pack)
    assert together.shape == (300, 100)
    for rows in (1, 4, 9, 129):
        assert torch.equal(linear(x[:rows], pack), together[:rows])


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, *GGUF])
@pytest.mark.parametrize("rows", [0, 1, 4, 5, 150])
def test_a_norm_before_a_product_gives_the_bits_of_both_apart(isa, rows, stored, gated):
    pack, norm, bias = pack_weight(weight_of(200, 96, stored), gated=gated), torch.randn(96), torch.randn(200)
    x, residual = torch.randn(rows, 100)[:, 2:98], torch.randn(rows, 96)
    normed, expected = rms_norm.add_rms_norm(x, residual, norm, 1e-5)
    for b in (None, bias):
        y, total = add_norm_linear(x, residual, norm, 1e-5, pack, b)
        assert torch.equal(total, expected)
        assert torch.equal(y, linear(normed, pack, b))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, *GGUF])
@pytest.mark.parametrize("inner", [48, 100])
def test_packing_a_gate_and_an_up_projection_loses_nothing(stored, inner):
    weight = weight_of(2 * inner, 64, stored)
    assert torch.equal(pack_weight(*weight.chunk(2), gated=True).unpack(), weight)
    assert torch.equal(pack_weight(weight, gated=True).unpack(), weight)


def test_packed_rows_may_be_a_part_of_wider_ones():
    wide = torch.randn(60, 200)
    assert torch.equal(pack_weight(wide[:, 40:104]).unpack(), wide[:, 40:104])
    assert torch.equal(pack_weight(wide.t()).unpack(), wide.t())


def test_rows_that_do_not_fit_into_panels_are_refused():
    assert cpu_ops.load()
    panels = torch.zeros(2, 64, PANEL)
    with pytest.raises(ValueError, match="do not fit into panels"):
        cpu_ops.pack_rows(torch.zeros(10, 64), panels, 90)
    with pytest.raises(TypeError, match="rows to pack must be"):
        cpu_ops.pack_rows(torch.zeros(10, 64, dtype=torch.bfloat16), panels, 0)


def test_wrong_shapes_are_refused():
    assert cpu_ops.load()
    pack = packed(torch.randn(50, 64))
    with pytest.raises(ValueError, match=r"x must be \[\.\.\., 64\]"):
        linear(torch.zeros(2, 63), pack)
    with pytest.raises(ValueError, match=r"bias must be \[50\]"):
        linear(torch.zeros(2, 64), pack, torch.zeros(49))
    with pytest.raises(ValueError, match="packed weight of 500"):
        cpu_ops.linear(torch.zeros(2, 64), pack.data, 500, False, False, None)
    coded = packed(q4_1(50, 64))
    with pytest.raises(ValueError, match=r"k a multiple of 32"):
        linear(torch.zeros(2, 63), coded)
    with pytest.raises(ValueError, match=r"k up to 64 and above 32"):
        linear(torch.zeros(2, 96), coded)
    with pytest.raises(ValueError, match="only a gate"):
        cpu_ops.linear(torch.zeros(2, 64), pack.data, 50, False, True, None)
    with pytest.raises(ValueError, match="one shape"):
        add_norm_linear(torch.zeros(2, 64), torch.zeros(1, 64), torch.ones(64), 1e-5, pack)
    with pytest.raises(ValueError, match=r"weight must be \[64\]"):
        add_norm_linear(torch.zeros(2, 64), torch.zeros(2, 64), torch.ones(63), 1e-5, pack)
    with pytest.raises(ValueError, match="as many columns"):
        cpu_ops.linear(torch.zeros(2, 64), pack.data, 49, True, True, None)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_refused_wherever_it_is(stored, value):
    assert cpu_ops.load()
    for row, column in ((0, 0), (47, 1), (48, 514), (59, 515)):
        weight = torch.randn(60, 516).to(stored)
        pack_weight(weight)
        weight[row, column] = value
        with pytest.raises(UnfitWeightError):
            pack_weight(weight)
