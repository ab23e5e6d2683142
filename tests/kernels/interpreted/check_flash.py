"""The FlashAttention backends with stand-ins for the packages, which have the packages' signatures and do as they do.

flash-attn 2.6 to 2.8 and the hopper folder's `flash_attn_interface`, 3.0: names, order and defaults of the arguments.
"""

import sys
import types

import pytest
import torch

from kernels.attention.backend import HeadNorms
from kernels.attention.flash_backend import Flash2Backend, Flash3Backend
from kernels.attention.torch_backend import TorchBackend, causal_attention
from kernels.rotary import rotary_table
from tests.kernels.paged import paged_batch

MIXED = ([1, 300, 70, 0, 33], [1, 17, 0, 0, 2])  # seq_lens, query_lens
DECODES = ([5, 270, 1], [1, 1, 1])
CALLS = []


def _paged(q, k_cache, v_cache, lengths, starts, table, scale, causal, window, softcap, out):
    """What both packages compute; rows of no sequence keep what `out` holds."""
    for tensor in (lengths, starts, table):
        assert tensor.dtype is torch.int32
        assert tensor.is_contiguous()
    assert q.stride(-1) == k_cache.stride(-1) == 1
    assert table.shape[0] == len(lengths) == len(starts) - 1
    assert causal
    assert window == (-1, -1) or window[1] == 0
    for i, length in enumerate(lengths.tolist()):
        first, last = starts[i : i + 2].tolist()
        if first == last:
            continue
        blocks = table[i, : -(-length // k_cache.shape[1])].long()
        k, v = (cache[blocks].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
        seen = window[0] + 1 if window[0] >= 0 else 0
        out[first:last] = causal_attention(q[first:last], k, v, scale, seen, softcap)
    return out


def _empty_like(q):
    return torch.full_like(q, torch.nan)


def flash_2():
    module = types.ModuleType("flash_attn")

    def flash_attn_with_kvcache(
        q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
        cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False,
        window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0,
        return_softmax_lse=False,
    ):  # fmt: skip
        CALLS.append("with_kvcache")
        assert k_cache.shape[1] % 256 == 0
        assert q.dim() == 4
        assert q.shape[:2] == (len(cache_seqlens), 1)
        starts = torch.arange(len(q) + 1, dtype=torch.int32)
        out = _paged(q[:, 0], k_cache, v_cache, cache_seqlens, starts, block_table, softmax_scale, causal,
                     window_size, softcap, _empty_like(q[:, 0]))  # fmt: skip
        return out[:, None]

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
        causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
        return_attn_probs=False, block_table=None,
    ):  # fmt: skip
        CALLS.append("varlen")
        assert k.shape[1] % 256 == 0
        assert max_seqlen_q > 1  # at 1 it folds the heads of a group into tokens and takes one token a sequence
        lengths = cu_seqlens_k.diff()
        assert max_seqlen_q >= int(cu_seqlens_q.diff().max())
        assert max_seqlen_k >= int(lengths.max())
        return _paged(q, k, v, lengths, cu_seqlens_q, block_table, softmax_scale, causal, window_size, softcap,
                      _empty_like(q))  # fmt: skip

    module.flash_attn_with_kvcache, module.flash_attn_varlen_func = flash_attn_with_kvcache, flash_attn_varlen_func
    return module


def flash_3():
    module = types.ModuleType("flash_attn_interface")

    def flash_attn_with_kvcache(
        q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
        cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
        max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
        causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
        scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False,
    ):  # fmt: skip
        CALLS.append("with_kvcache")
        assert q.dim() == 3
        assert max_seqlen_q >= int(cu_seqlens_q.diff().max())
        return _paged(q, k_cache, v_cache, cache_seqlens, cu_seqlens_q, page_table, softmax_scale, causal,
                      window_size, softcap, _empty_like(q))  # fmt: skip

    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    return module


@pytest.fixture(params=[(Flash2Backend, flash_2, 256), (Flash3Backend, flash_3, 16)], ids=["2", "3"])
def flash(request, monkeypatch):
    backend, module, block_size = request.param
    monkeypatch.setitem(sys.modules, backend.package, module())
    CALLS.clear()
    return backend(), block_size


def paged(backend, *shape):
    """A batch in the torch backend's layout, which is these backends' too, and written by it."""
    batch = paged_batch(TorchBackend(), *shape)
    caches = backend.kv_cache(*batch.k_cache.shape, torch.float32, "cpu")
    assert [cache.shape for cache in caches] == [batch.k_cache.shape] * 2
    return batch


@pytest.mark.parametrize(("window", "soft_cap"), [(0, 0.0), (20, 5.0)])
@pytest.mark.parametrize("lens", [MIXED, DECODES])
def test_it_computes_what_the_torch_backend_does(flash, lens, window, soft_cap):
    backend, block_size = flash
    for padding in (0, 3):
        shape = (*lens, 4, 2, 32, block_size, padding)
        batch = paged(backend, *shape)
        rest = (32**-0.5, window, soft_cap)
        got = backend.attend(batch.q, batch.k_cache, batch.v_cache, batch.metadata, *rest)
        expected = TorchBackend().attend(batch.q, batch.k_cache, batch.v_cache, batch.metadata, *rest)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-6)


def test_flash_2_decodes_by_its_kv_cache_function_and_mixes_by_varlen(flash):
    backend, block_size = flash
    for lens, padding in ((DECODES, 0), (DECODES, 2), (MIXED, 0)):
        batch = paged(backend, *lens, 4, 2, 32, block_size, padding)
        backend.attend(batch.q, batch.k_cache, batch.v_cache, batch.metadata, 0.2)
    expected = {"flash-attn": ["with_kvcache", "varlen", "varlen"], "flash-attn-3": ["with_kvcache"] * 3}
    assert expected[backend.name] == CALLS


def test_rows_of_padding_sequences_are_zeros(flash):
    backend, block_size = flash
    batch = paged(backend, [9, 40, 1, 1], [1, 1, 0, 0], 4, 2, 32, block_size, 2)
    got = backend.attend(batch.q, batch.k_cache, batch.v_cache, batch.metadata, 0.2)
    assert got[:2].abs().sum() > 0
    assert not got[2:].any()


def test_tokens_are_normed_turned_and_stored(flash):
    backend, block_size = flash
    q, k, v = torch.randn(9, 10, 32).split((6, 2, 2), dim=1)
    norms = HeadNorms(torch.randn(32), torch.randn(32), 1e-6)
    cos, sin = rotary_table(32, 64, 1e4, "default", {})
    positions, slots = torch.randint(0, 64, (9,)), torch.randperm(2 * block_size)[:9]
    slots[4] = -1
    results = []
    for each in (backend, TorchBackend()):
        caches = each.kv_cache(2, block_size, 2, 32, torch.float32, "cpu")
        results.append((each.norm_rotary_write(q, k, v, norms, cos, sin, positions, *caches, slots), *caches))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
