"""Paged attention, its split form, and the kernel that norms, turns and stores.

The interpreter multiplies no bfloat16 matrices and cuts float32 to bfloat16 and to float8 where a GPU rounds to the
nearest. So queries are float32 or float16 here, and what those two caches hold is written by the reference.
"""

import pytest
import torch

from kernels.attention.backend import FP8, HeadNorms
from kernels.attention.torch_backend import TorchBackend
from kernels.attention.triton_backend import TritonBackend, gathered_attention
from kernels.gpu import Gpu
from kernels.gpu.attention_tiles import choose_splits
from kernels.rotary import rotary_table
from tests.kernels.paged import paged_batch

H200, T4, RTX3070 = Gpu((9, 0), 132), Gpu((7, 5), 40), Gpu((8, 6), 46)
MIXED = ([1, 17, 70, 100, 0, 33], [1, 17, 0, 30, 0, 2])  # seq_lens, query_lens
DECODES = ([5, 70, 1, 150], [1, 1, 1, 1])


class TritonByReference(TritonBackend):
    """Writes as the torch backend does, which takes no program for each token."""

    def write(self, k, v, k_cache, v_cache, slots):
        plain = TorchBackend(kv_dtype=k_cache.dtype)
        blocks, kv_heads, block_size, width = k_cache.shape
        head_dim = k.shape[-1]
        for new, cache in ((k, k_cache), (v, v_cache)):
            pages = torch.zeros(blocks, block_size, kv_heads, width * cache.itemsize, dtype=torch.uint8).view(
                cache.dtype
            )
            plain.write(new, new, pages, pages.clone(), slots)
            for slot in slots[slots >= 0].tolist():
                block, row = divmod(slot, block_size)
                token = pages[block, row]  # [kv_heads, width]
                if cache.itemsize > 1:
                    cache[block, :, row] = token
                else:
                    flat = cache.view(torch.uint8)[block].flatten(1)
                    flat[:, row * head_dim : (row + 1) * head_dim] = token.view(torch.uint8)[:, :head_dim]
                    at = block_size * head_dim + 4 * row
                    flat[:, at : at + 4] = token.view(torch.uint8)[:, head_dim:]


def compare(backend, lens, heads, kv_heads, head_dim, block_size=16, window=0, soft_cap=0.0, half=False):
    shape = (*lens, heads, kv_heads, head_dim, block_size)
    batch = paged_batch(backend, *shape, padding_tokens=3)
    plain = TorchBackend(kv_dtype=backend.kv_dtype)
    expected = paged_batch(plain, *shape, padding_tokens=3)
    rest = (head_dim**-0.5, window, soft_cap)
    q = batch.q.half() if half else batch.q
    got = backend.attend(q, batch.k_cache, batch.v_cache, batch.metadata, *rest)
    tolerance = 4e-3 if half else 2e-5
    torch.testing.assert_close(
        got.float(), plain.attend(expected.q, expected.k_cache, expected.v_cache, expected.metadata, *rest),
        rtol=tolerance, atol=tolerance / 4,
    )  # fmt: skip
    assert not got[-3:].any()


@pytest.mark.parametrize(
    ("gpu", "heads", "kv_heads", "head_dim", "block_size"), [(H200, 6, 2, 64, 16), (RTX3070, 2, 2, 80, 32)]
)
def test_mixed_batches(gpu, heads, kv_heads, head_dim, block_size):
    compare(TritonByReference(gpu=gpu), MIXED, heads, kv_heads, head_dim, block_size)


@pytest.mark.parametrize(
    ("gpu", "heads", "kv_heads", "head_dim", "block_size"),
    [(H200, 14, 2, 96, 16), (T4, 6, 2, 64, 48), (H200, 2, 1, 256, 16)],
)
def test_decodes(gpu, heads, kv_heads, head_dim, block_size):
    compare(TritonByReference(gpu=gpu), DECODES, heads, kv_heads, head_dim, block_size)


@pytest.mark.parametrize(
    ("gpu", "stored"),
    [
        (H200, torch.float16),
        (H200, torch.bfloat16),
        (H200, torch.int8),
        (H200, FP8),
        (RTX3070, FP8),
        (T4, torch.int8),
        (T4, FP8),
    ],
)
def test_caches_of_other_types(gpu, stored):
    backend = TritonByReference(gpu=gpu, kv_dtype=stored)
    compare(backend, ([5, 50], [1, 1]), 3, 1, 64)
    compare(backend, ([17, 40], [9, 2]), 3, 1, 64)


def test_float16_queries():
    compare(TritonByReference(gpu=H200), ([17, 40], [17, 9]), 3, 1, 64, half=True)
    compare(TritonByReference(gpu=H200, kv_dtype=torch.int8), ([5, 50], [1, 1]), 3, 1, 64, half=True)


@pytest.mark.parametrize(
    ("gpu", "window", "soft_cap"), [(H200, 1, 0.0), (H200, 20, 5.0), (H200, 0, 5.0), (T4, 20, 5.0)]
)
def test_window_and_soft_cap(gpu, window, soft_cap):
    compare(TritonByReference(gpu=gpu), ([17, 70], [17, 9]), 2, 1, 32, window=window, soft_cap=soft_cap)
    compare(TritonByReference(gpu=gpu), ([5, 70], [1, 1]), 2, 1, 32, window=window, soft_cap=soft_cap)


@pytest.mark.parametrize(
    ("lens", "window"), [(([600, 40], [1, 1]), 0), (([600, 40], [1, 1]), 300), (([600, 40], [3, 2]), 0)]
)
def test_long_contexts_split_among_programs(lens, window, monkeypatch):
    counts = []

    def counted(*arguments):
        counts.append(choose_splits(*arguments))
        return counts[-1]

    monkeypatch.setattr("kernels.gpu.attention_tiles.choose_splits", counted)
    compare(TritonByReference(gpu=H200), lens, 2, 1, 32, window=window)
    assert counts[0] > 1


def test_a_batch_of_padding_alone_is_zeros():
    backend = TritonBackend(gpu=H200)
    batch = paged_batch(backend, [5, 9], [0, 0], 4, 2, 32, 16, padding_tokens=4)
    batch.q.fill_(float("nan"))
    assert torch.equal(
        backend.attend(batch.q, batch.k_cache, batch.v_cache, batch.metadata, 1.0), torch.zeros(4, 4, 32)
    )  # fmt: skip


def test_gathered_attention_is_what_cards_without_tensor_cores_for_triton_run():
    backend = TritonBackend(gpu=T4)
    batch = paged_batch(backend, *MIXED, 4, 2, 32, 16)
    got = backend.attend(batch.q, batch.k_cache, batch.v_cache, batch.metadata, 0.2)
    assert torch.equal(got, gathered_attention(batch.q, batch.k_cache, batch.v_cache, batch.metadata, 0.2))


def as_torch_layout(cache, head_dim):
    """A cache of the triton backend in the torch backend's layout, scales too."""
    if cache.itemsize > 1:
        return cache.transpose(1, 2)
    block_size = cache.shape[2]
    pages = cache.view(torch.uint8).flatten(2)
    values = pages[..., : block_size * head_dim].unflatten(2, (block_size, head_dim))
    scales = pages[..., block_size * head_dim :].unflatten(2, (block_size, 4))
    return torch.cat((values, scales), -1).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("stored", "gpu"), [(None, H200), (torch.int8, H200), (FP8, RTX3070)])
def test_stored_numbers_are_the_references(stored, gpu, dtype):
    """Bit by bit: values, scales, and untouched slots."""
    k, v = (torch.randn(2, 30, 3, 80) * torch.rand(30, 3, 1) * 50).to(dtype)
    k[7], v[8, 1] = 0.0, 1e-6
    slots = torch.randperm(64)[:30]
    slots[::7] = -1
    caches = []
    for backend in (TritonBackend(gpu=gpu, kv_dtype=stored), TorchBackend(kv_dtype=stored)):
        k_cache, v_cache = backend.kv_cache(4, 16, 3, 80, dtype, "cpu")
        assert k_cache.nbytes + v_cache.nbytes == 64 * backend.kv_token_bytes(3, 80, dtype)
        backend.write(k, v, k_cache, v_cache, slots)
        caches.append((k_cache, v_cache))
    for fast, plain in zip(*caches, strict=True):
        assert torch.equal(as_torch_layout(fast, 80), plain.view(torch.uint8) if plain.itemsize == 1 else plain)


def test_native_float8_stores_its_own_numbers_as_they_are():
    """The interpreter rounds to float8 wrongly where a mantissa runs over; numbers that need no rounding it keeps."""
    backend = TritonBackend(gpu=H200, kv_dtype=FP8)
    numbers = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    numbers = numbers[numbers.abs() >= 2**-6]  # the normal ones; NaN is not among them
    k = numbers[torch.randint(0, len(numbers), (10, 2, 64))]
    k[:, :, 0] = 448.0
    k_cache, v_cache = backend.kv_cache(1, 16, 2, 64, torch.float32, "cpu")
    backend.write(k, -k, k_cache, v_cache, torch.arange(10))
    for cache, written in ((k_cache, k), (v_cache, -k)):
        pages = as_torch_layout(cache, 64)[0, :10]
        assert torch.equal(pages[..., :64].contiguous().view(FP8).float(), written)
        assert (pages[..., 64:].contiguous().view(torch.float32) == 1.0).all()


@pytest.mark.parametrize("rotary_dim", [64, 48])
@pytest.mark.parametrize("normed", [True, False])
def test_norm_rotary_and_store_in_one_are_the_three_apart(normed, rotary_dim):
    qkv = torch.randn(9, 16, 64)
    before = qkv.clone()
    q, k, v = qkv.split((10, 3, 3), dim=1)
    norms = HeadNorms(torch.randn(64), torch.randn(64), 1e-6) if normed else None
    cos, sin = rotary_table(rotary_dim, 64, 1e4, "default", {})
    positions, slots = torch.randint(0, 64, (9,)), torch.randperm(32)[:9]
    slots[4] = -1
    turned, caches = [], []
    for backend in (TritonBackend(gpu=H200), TorchBackend()):
        pair = backend.kv_cache(2, 16, 3, 64, torch.float32, "cpu")
        turned.append(backend.norm_rotary_write(q, k, v, norms, cos, sin, positions, *pair, slots))
        caches.append(pair)
    torch.testing.assert_close(turned[0], turned[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(caches[0][0].transpose(1, 2), caches[1][0], rtol=1e-5, atol=1e-5)
    assert torch.equal(caches[0][1].transpose(1, 2), caches[1][1])
    assert torch.equal(qkv, before)
