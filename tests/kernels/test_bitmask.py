"""Logits under a bitmask."""

import numpy as np
import pytest
import torch

from kernels.bitmask import apply_bitmask, reference


def packed(allowed: np.ndarray) -> torch.Tensor:
    """bool [rows, vocab] -> int32 [rows, ceil(vocab / 32)], by numpy's own packing."""
    padded = np.pad(allowed, ((0, 0), (0, -allowed.shape[1] % 32)))
    return torch.from_numpy(np.packbits(padded, axis=1, bitorder="little").view(np.int32).copy())


def case(rows: int, vocab: int, share: float, seed: int = 0) -> tuple[torch.Tensor, np.ndarray]:
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.standard_normal((rows, vocab), dtype=np.float32)), rng.random((rows, vocab)) < share


@pytest.mark.parametrize("function", [apply_bitmask, reference])
@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 384, 1000])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.9, 1.0])
def test_barred_tokens_are_minus_infinity_and_the_others_untouched(function, vocab, share):
    logits, allowed = case(3, vocab, share)
    before = logits.clone()
    function(logits, packed(allowed))
    assert torch.equal(logits, torch.where(torch.from_numpy(allowed), before, -torch.inf))


@pytest.mark.parametrize("function", [apply_bitmask, reference])
def test_only_the_given_rows_are_masked(function):
    logits, allowed = case(5, 70, 0.5)
    before = logits.clone()
    function(logits, packed(allowed[:2]), torch.tensor([3, 1]))
    assert torch.equal(logits[[0, 2, 4]], before[[0, 2, 4]])
    assert torch.equal(logits[[3, 1]], torch.where(torch.from_numpy(allowed[:2]), before[[3, 1]], -torch.inf))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_is_the_reference_in_every_dtype_and_keeps_values_that_are_not_finite(dtype):
    logits, allowed = case(4, 200, 0.5)
    logits[:, ::7], logits[:, ::11] = torch.inf, -torch.inf
    logits[:, ::5][torch.from_numpy(allowed[:, ::5])] = torch.nan
    logits = logits.to(dtype)
    expected = logits.clone()
    apply_bitmask(logits, packed(allowed))
    reference(expected, packed(allowed))
    assert expected.isnan().any()
    torch.testing.assert_close(logits, expected, rtol=0, atol=0, equal_nan=True)


def test_it_works_in_place_on_a_view_and_under_inference_mode():
    wide, allowed = case(4, 100, 0.5)
    with torch.inference_mode():
        logits = wide.clone()[:, :64]
        before = logits.clone()
        apply_bitmask(logits, packed(allowed[:, :64]))
    assert torch.equal(logits, torch.where(torch.from_numpy(allowed[:, :64]), before, -torch.inf))


@pytest.mark.parametrize(
    ("bitmask", "rows"),
    [
        (torch.zeros(2, 3, dtype=torch.int32), None),
        (torch.zeros(3, 2, dtype=torch.int32), None),
        (torch.zeros(2, 2, dtype=torch.int64), None),
        (torch.zeros(2, 2, dtype=torch.int32), torch.tensor([0])),
    ],
)
def test_shapes_that_do_not_fit_are_refused(bitmask, rows):
    with pytest.raises(ValueError, match="bitmask must be int32"):
        apply_bitmask(torch.zeros(2, 64), bitmask, rows)
