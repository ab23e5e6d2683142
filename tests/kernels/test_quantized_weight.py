"""Codes that stand for exactly the values given, and where there are none."""

import math

import pytest
import torch

from kernels import cpu_ops
from kernels.quantized_weight import UnfitWeightError, exact_codes, quantize_weight
from tests.kernels.weights import q4_0, q4_1, q5_0, q8_0


@pytest.mark.parametrize(("make", "four_bits"), [(q4_0, True), (q4_1, True), (q5_0, False), (q8_0, False)])
@pytest.mark.parametrize("find", [exact_codes, quantize_weight])
def test_values_of_a_gguf_format_come_out_as_they_are(make, four_bits, find):
    weight = make(100, 128)
    found = find(weight)
    assert (found.offset is not None) == four_bits
    assert torch.equal(found.unpack(), weight)


def test_groups_of_several_formats_in_one_matrix_are_found():
    weight = torch.cat((q4_0(50, 64), q4_1(50, 64), torch.full((1, 64), 0.25), torch.zeros(1, 64)))
    assert torch.equal(exact_codes(weight).unpack(), weight)


def test_one_value_that_is_no_code_is_enough_to_find_none():
    for make in (q4_1, q8_0):
        weight = make(100, 128)
        weight[99, 127] *= 1.001
        assert exact_codes(weight) is None
    weight = q4_1(100, 128)
    weight[99, 127] = math.nan
    assert exact_codes(weight) is None
    assert exact_codes(torch.randn(48, 64)) is None
    assert exact_codes(q8_0(48, 64)[:, :33]) is None


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("make", [q4_0, q4_1, q5_0, q8_0])
def test_the_kernel_finds_the_codes_of_the_definition(make, gated, monkeypatch):
    weight = torch.cat((make(48 * 40, 96), torch.full((1, 96), 0.25), torch.zeros(1, 96)))
    parts = weight.chunk(2)
    found = exact_codes(*parts, gated=gated)
    monkeypatch.setattr(cpu_ops, "load", lambda: False)
    expected = exact_codes(*parts, gated=gated)
    assert torch.equal(found.data, expected.data)
    assert torch.equal(found.scale, expected.scale)
    assert found.offset is None if expected.offset is None else torch.equal(found.offset, expected.offset)


@pytest.mark.parametrize("make", [q4_1, q8_0])
def test_rows_are_rows_of_the_weight(make):
    weight, index = make(100, 96), torch.tensor([99, 0, 47, 48, 99])
    assert torch.equal(exact_codes(weight).rows(index), weight[index])


@pytest.mark.parametrize("make", [q4_1, q8_0])
def test_many_rows_too(make):
    weight, index = make(100, 96), torch.randint(0, 100, (500,))
    assert torch.equal(exact_codes(weight).rows(index), weight[index])


def test_a_row_outside_is_refused():
    assert cpu_ops.load()
    with pytest.raises(IndexError, match="row 100 is outside"):
        exact_codes(q4_1(100, 96)).rows(torch.tensor([100]))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("n", "k"), [(100, 96), (2 * 48, 64), (2, 130), (48 * 40 + 2, 64)])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_the_kernel_rounds_as_the_definition_does(n, k, gated, stored, monkeypatch):
    weight = (torch.randn(n, k) * torch.rand(n, 1)).to(stored)
    weight[0, :32] = 0
    weight[1, 3] = 1e6
    parts = weight.split([n // 2, n - n // 2] if gated else [1, n - 1])
    found = quantize_weight(*parts, gated=gated)
    monkeypatch.setattr(cpu_ops, "load", lambda: False)
    expected = quantize_weight(weight, gated=gated)
    assert found.data.shape == (expected.scale.shape[0], expected.scale.shape[1] * 8, 48, 4)
    assert torch.equal(found.data, expected.data)
    assert torch.equal(found.scale, expected.scale)
    assert found.offset is None


def test_parts_of_a_gated_weight_have_the_codes_of_both_in_one():
    weight = q4_1(200, 64)
    found, expected = exact_codes(*weight.chunk(2), gated=True), exact_codes(weight, gated=True)
    assert torch.equal(found.data, expected.data)
    assert torch.equal(found.offset, expected.offset)


def test_rows_that_do_not_fit_into_codes_are_refused():
    assert cpu_ops.load()
    weight = exact_codes(q8_0(96, 64))
    with pytest.raises(ValueError, match="do not fit into codes"):
        cpu_ops.code_rows(torch.zeros(10, 64), weight.data, weight.scale, None, 90, 1, 0, False)
    with pytest.raises(ValueError, match="do not fit into codes"):
        cpu_ops.code_rows(torch.zeros(10, 64), weight.data, weight.scale, weight.scale, 0, 1, 0, True)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf, 9e6])
def test_a_number_that_has_no_code_is_refused_wherever_it_is(compiled, value, monkeypatch):
    if not compiled:
        monkeypatch.setattr(cpu_ops, "load", lambda: False)
    for place in (slice(0, 1), slice(63, 64), slice(77, 78), slice(0, 96)):
        weight = torch.randn(60, 96)
        weight[57, place] = value
        with pytest.raises(UnfitWeightError):
            quantize_weight(weight)
