"""Low-rank adapters: the C++ kernel against the definition, and that against a merged weight."""

import numpy as np
import pytest
import torch

from kernels import cpu_ops, lora
from kernels.lora import LoraTokens, lora_tiles, lora_weights

CPU = torch.device("cpu")


def weights(slots, rank, k, parts, dtype=torch.float32):
    made = lora_weights(slots, rank, k, parts, dtype=dtype, device=CPU)
    made.a.normal_()
    made.b.normal_()
    return made


def tokens_of(slots):
    order, tiles = lora_tiles(np.array(slots, dtype=np.int32))
    return LoraTokens(torch.from_numpy(order), torch.from_numpy(tiles))


def test_tokens_are_grouped_by_adapter_in_tiles_in_their_order():
    order, tiles = lora_tiles(np.array([2, -1, 0, 2, 0, *[1] * 18, -1, 2], dtype=np.int32))
    assert order.tolist() == [2, 4, *range(5, 23), 0, 3, 24]
    assert tiles.tolist() == [[0, 0, 2], [1, 2, 18], [1, 18, 20], [2, 20, 23]]
    assert order.dtype == tiles.dtype == np.int32


def test_no_adapter_is_no_tile():
    order, tiles = lora_tiles(np.full(5, -1, dtype=np.int32))
    assert (order.shape, tiles.shape) == ((0,), (0, 3))


def test_the_definition_is_a_product_with_the_merged_weight():
    made = weights(2, 4, 20, (24, 8))
    x, y = torch.randn(6, 20), torch.randn(6, 32)
    expected = y.clone()
    for at, slot in ((0, 1), (2, 0), (3, 1), (5, 1)):
        for part, columns in enumerate((slice(0, 24), slice(24, 32))):
            merged = made.b[slot, :, columns].T @ made.a[slot, :, part * 16 : part * 16 + 16].T  # [out, in]
            expected[at, columns] += merged @ x[at]
    lora.reference(y, x, made, tokens_of([1, -1, 0, 1, -1, 1]))
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("rank", "k", "parts"), [(8, 64, (64, 32, 32)), (16, 33, (17, 5)), (40, 96, (200,))])
def test_the_kernel_equals_the_definition(isa, rank, k, parts):
    made = weights(3, rank, k, parts)
    slots = torch.randint(-1, 3, (50,)).tolist()
    x, y = torch.randn(50, k + 7)[:, :k], torch.randn(50, sum(parts) + 3)[:, : sum(parts)]
    expected = y.clone()
    lora.reference(expected, x, made, tokens_of(slots))
    lora.add_lora(y, x, made, tokens_of(slots))
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-3)


def test_a_token_has_the_same_bits_in_every_batch(isa):
    made = weights(2, 16, 48, (64, 32))
    x, y = torch.randn(37, 48), torch.randn(37, 96)
    slots = torch.randint(-1, 2, (37,)).tolist()
    alone = y.clone()
    for at, slot in enumerate(slots):
        lora.add_lora(alone[at : at + 1], x[at : at + 1], made, tokens_of([slot]))
    lora.add_lora(y, x, made, tokens_of(slots))
    assert torch.equal(y, alone)


def test_a_step_too_small_to_share_and_one_that_is_shared_agree():
    made = weights(2, 16, 640, (960,))
    x, y = torch.randn(300, 640), torch.zeros(300, 960)
    slots = [0, 1] * 150
    lora.add_lora(y, x, made, tokens_of(slots))
    few = torch.zeros(2, 960)
    lora.add_lora(few, x[:2], made, tokens_of(slots[:2]))
    assert torch.equal(y[:2], few)


@pytest.mark.parametrize("isa", ["portable"], indirect=True)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 5)}, "a and b must be"),
        ({"parts": (8, 8)}, "parts must add up"),
        ({"tokens": torch.tensor([0, 2], dtype=torch.int32)}, "token 2 of 2"),
        ({"tiles": torch.tensor([[1, 0, 2]], dtype=torch.int32)}, "tile 0"),
        ({"tiles": torch.tensor([[0, 0, 3]], dtype=torch.int32)}, "tile 0"),
    ],
)
def test_what_does_not_fit_is_refused(isa, change, message):
    fitting = {
        "y": torch.zeros(2, 32),
        "x": torch.zeros(2, 4),
        "a": torch.zeros(1, 4, 16),
        "b": torch.zeros(1, 16, 32),
        "parts": (32,),
        "tokens": torch.tensor([0, 1], dtype=torch.int32),
        "tiles": torch.tensor([[0, 0, 2]], dtype=torch.int32),
    }
    cpu_ops.add_lora(**fitting)
    with pytest.raises((ValueError, IndexError), match=message):
        cpu_ops.add_lora(**(fitting | change))
