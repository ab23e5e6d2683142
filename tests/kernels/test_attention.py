"""Paged attention: torch backend against SDPA on contiguous KV, C++ backend against the torch backend.

KV caches of bfloat16 and int8: stored numbers against their definition, then the same comparisons."""

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels import cpu_ops
from kernels.attention import select_backend
from kernels.attention.cpu_backend import CpuBackend
from kernels.attention.torch_backend import TorchBackend
from kernels.rotary import rotary_table
from tests.kernels.paged import paged_batch, slots_of

RAGGED = ([1, 17, 100, 130, 0, 33, 260], [1, 17, 0, 40, 0, 2, 1])  # seq_lens, query_lens


def attend(backend, batch):
    scale = 1 / math.sqrt(batch.q.shape[-1])
    return backend.attend(batch.q, batch.k_cache, batch.v_cache, batch.metadata, scale)


def contiguous_attention(batch, window=10**9):
    """The answer without pages, from torch's own attention."""
    out = torch.zeros_like(batch.q)
    starts = batch.metadata.query_start.tolist()
    for i, (k, v) in enumerate(zip(batch.keys, batch.values, strict=True)):
        q = batch.q[starts[i] : starts[i + 1]]
        if len(q) == 0:
            continue
        seen = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q)).triu(len(k) - len(q) - window + 1)
        heads_first = [t.transpose(0, 1)[None] for t in (q, k, v)]
        attended = scaled_dot_product_attention(*heads_first, attn_mask=seen, enable_gqa=True)
        out[starts[i] : starts[i + 1]] = attended[0].transpose(0, 1)
    return out


@pytest.mark.parametrize("block_size", [1, 4, 16, 48])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (9, 3), (8, 1)])
def test_torch_backend_equals_sdpa_on_contiguous_kv(heads, kv_heads, block_size):
    batch = paged_batch(TorchBackend(), *RAGGED, heads, kv_heads, 32, block_size, padding_tokens=3)
    torch.testing.assert_close(attend(TorchBackend(), batch), contiguous_attention(batch), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("window", [1, 16, 50, 1000])
def test_torch_backend_with_a_window_equals_sdpa_under_a_band(window):
    batch = paged_batch(TorchBackend(), *RAGGED, 4, 2, 32, 16, padding_tokens=3)
    got = TorchBackend().attend(batch.q, batch.k_cache, batch.v_cache, batch.metadata, 32**-0.5, window)
    torch.testing.assert_close(got, contiguous_attention(batch, window), rtol=1e-5, atol=2e-6)


def test_a_soft_cap_bounds_the_scores_before_the_softmax():
    batch = paged_batch(TorchBackend(), [3], [1], 1, 1, 16, 16)
    got = TorchBackend().attend(batch.q, batch.k_cache, batch.v_cache, batch.metadata, 2.0, soft_cap=1.5)
    scores = [1.5 * math.tanh(2.0 * float(batch.q[0, 0] @ key) / 1.5) for key in batch.keys[0][:, 0]]
    weights = torch.tensor([math.exp(score) for score in scores])
    expected = (weights / weights.sum()) @ batch.values[0][:, 0]
    torch.testing.assert_close(got[0, 0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("block_size", [16, 32])
def test_cpu_backend_equals_torch_backend(isa, group, head_dim, block_size):
    shape = (2 * group, 2, head_dim, block_size)
    fast = paged_batch(CpuBackend(), *RAGGED, *shape, padding_tokens=3)
    plain = paged_batch(TorchBackend(), *RAGGED, *shape, padding_tokens=3)
    before = fast.q.clone(), fast.k_cache.clone(), fast.v_cache.clone()
    got = attend(CpuBackend(), fast)
    torch.testing.assert_close(got, attend(TorchBackend(), plain), rtol=2e-5, atol=5e-6)
    assert not got[-3:].any()
    for tensor, copy in zip((fast.q, fast.k_cache, fast.v_cache), before, strict=True):
        torch.testing.assert_close(tensor, copy, rtol=0, atol=0, equal_nan=True)


NARROW = [torch.bfloat16, torch.int8]


def assert_near(got, expected, dtype, isa):
    """got, expected: [tokens, heads, head_dim], of one cache of that type.

    A row's own numbers have 14 bits beside an int8 cache, and 8 beside a bfloat16 one where the CPU multiplies those.
    """
    if dtype is torch.float32 or (dtype is torch.bfloat16 and isa != "avx512_bf16"):
        torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)
        return
    error, size = (got - expected).norm(dim=-1), expected.norm(dim=-1)
    assert (error <= size * (0.02 if dtype is torch.bfloat16 else 0.001)).all()


def spread(keys):
    """keys: [..., head_dim] -> as an int8 cache of the CPU backend has them: a Walsh-Hadamard transform."""
    block = keys.shape[-1] & -keys.shape[-1]
    transform = torch.ones(1, 1)
    while len(transform) < block:
        transform = torch.cat((transform.repeat(1, 2), torch.cat((transform, -transform), dim=1)))
    return (keys.unflatten(-1, (-1, block)) @ transform / block**0.5).flatten(-2)


def plain_pages(k_cache, v_cache, head_dim):
    """-> a CPU backend's K and V as [num_blocks, block_size, kv_heads, head_dim], a type of 8 bits in int8."""
    num_blocks, heads, block_size = v_cache.shape[:3]
    per = 4 // k_cache.itemsize
    k, v = (cache.flatten(2)[..., : head_dim * block_size] for cache in (k_cache, v_cache))
    k = k.reshape(num_blocks, heads, head_dim // per, block_size, per).permute(0, 3, 1, 2, 4).flatten(3)
    v = v.reshape(num_blocks, heads, block_size // per, head_dim, per).permute(0, 2, 4, 1, 3).flatten(1, 2)
    if k_cache.dtype is torch.int8:
        k, v = ((x.view(torch.uint8).int() - 128).to(torch.int8) for x in (k.contiguous(), v.contiguous()))
    return k, v


def largest_error(dtype, values):
    """Of storing values: [..., head_dim] of one token and head."""
    if dtype is torch.bfloat16:
        return values.abs() * 2**-8
    return values.abs().amax(-1, keepdim=True) / 127 * 0.501 + 1e-30  # what is smaller counts as zero


def plain_batch(dtype, fast, *arguments, **options):
    """`paged_batch` for a TorchBackend, with what the cache of `fast`, that batch for a CpuBackend, holds in int8."""
    batch = paged_batch(TorchBackend(kv_dtype=dtype), *arguments, **options)
    if dtype is torch.int8:
        head_dim, caches = batch.q.shape[-1], (fast.k_cache, fast.v_cache)
        for plain, cache, page in zip(
            (batch.k_cache, batch.v_cache), caches, plain_pages(*caches, head_dim), strict=True
        ):
            scale = cache.flatten(2)[..., head_dim * page.shape[1] :].contiguous().view(torch.float32)
            plain[..., :head_dim] = page
            plain[..., head_dim:] = scale.mT.contiguous()[..., None].view(torch.int8)
        batch.q = spread(batch.q)
    return batch


@pytest.mark.parametrize(("dtype", "tolerance"), [*((dtype, 0.02) for dtype in NARROW), (torch.float8_e4m3fn, 0.04)])
def test_torch_backend_with_a_narrow_cache_stays_near_sdpa(dtype, tolerance):
    batch = paged_batch(TorchBackend(kv_dtype=dtype), *RAGGED, 9, 3, 64, 16, padding_tokens=3)
    assert batch.k_cache.dtype is dtype
    got, expected = attend(TorchBackend(), batch), contiguous_attention(batch)
    assert (got - expected).norm() < tolerance * expected.norm()


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("block_size", [16, 32])
def test_cpu_backend_with_a_narrow_cache_equals_torch_backend(isa, group, head_dim, block_size, dtype):
    shape = (2 * group, 2, head_dim, block_size)
    backend = CpuBackend(kv_dtype=dtype)
    fast = paged_batch(backend, *RAGGED, *shape, padding_tokens=3)
    plain = plain_batch(dtype, fast, *RAGGED, *shape, padding_tokens=3)
    assert fast.k_cache.dtype is dtype
    assert_near(attend(backend, fast), attend(TorchBackend(), plain), dtype, isa)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize(("block_size", "head_dim"), [(48, 80), (128, 16), (256, 80)])
def test_cpu_backend_with_a_narrow_cache_takes_odd_shapes(isa, block_size, head_dim, dtype):
    arguments = ([1, 300, 1500, 70], [1, 1, 2, 70], 52, 1, head_dim, block_size)
    backend = CpuBackend(kv_dtype=dtype)
    fast = paged_batch(backend, *arguments)
    plain = plain_batch(dtype, fast, *arguments)
    assert_near(attend(backend, fast), attend(TorchBackend(), plain), dtype, isa)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 256])
def test_both_backends_store_the_same_narrow_numbers(isa, head_dim, dtype):
    k, v = torch.randn(2, 60, 2, head_dim) * torch.rand(60, 2, 1) * 50
    k[7], v[8, 1], k[9, 0, 3] = 0.0, 1e-38, 1e30
    slots = torch.randperm(64)[:60]
    slots[::7] = -1
    kept = slots[slots >= 0]
    fast, plain = CpuBackend(kv_dtype=dtype), TorchBackend(kv_dtype=dtype)
    caches, plain_caches = (b.kv_cache(4, 16, 2, head_dim, torch.float32, "cpu") for b in (fast, plain))
    assert sum(cache.nbytes for cache in caches) == 64 * fast.kv_token_bytes(2, head_dim, torch.float32)
    fast.write(k, v, *caches, slots)
    written = (spread(k) if dtype is torch.int8 else k, v)
    plain.write(*written, *plain_caches, slots)
    pages = plain_pages(*caches, head_dim)
    for cache, page, plain_cache, values in zip(caches, pages, plain_caches, written, strict=True):
        got, expected = page.flatten(0, 1)[kept], plain_cache[..., :head_dim].flatten(0, 1)[kept]
        if values is v or dtype is torch.bfloat16:
            assert torch.equal(got, expected)
        else:  # sums of the transform may be rounded otherwise
            differences = (got.int() - expected.int()).abs()
            assert differences.max() <= 1
            assert differences.float().mean() < 0.01
        if dtype is torch.int8:
            expected_scale = plain_cache[..., head_dim:].contiguous().view(torch.float32)[..., 0]
            scale = cache.flatten(2)[..., head_dim * 16 :].contiguous().view(torch.float32).mT  # [blocks, 16, kv_heads]
            torch.testing.assert_close(scale, expected_scale, rtol=1e-5, atol=0)
            got = got * scale.flatten(0, 1)[kept][..., None]
        error = got.float() - values[slots >= 0]
        assert (error.abs() <= largest_error(dtype, values[slots >= 0])).all()


def test_keys_with_outliers_keep_their_precision_in_int8(isa):
    """As a model's keys have them: a few dimensions, far from zero in all tokens."""
    errors = []
    for backend in (CpuBackend(kv_dtype=torch.int8), TorchBackend(kv_dtype=torch.int8)):
        k_cache, v_cache = backend.kv_cache(7, 16, 2, 64, torch.float32, "cpu")
        g = torch.Generator().manual_seed(0)
        k, v = torch.randn(2, 100, 2, 64, generator=g)
        k[..., 5] += 40
        k[..., 41] -= 30
        batch = paged_batch(backend, [100], [1], 2, 2, 64, 16, poison=False)
        m = batch.metadata
        m.block_tables[m.rows[0]] = torch.arange(7, dtype=torch.int32)
        backend.write(k, v, k_cache, v_cache, torch.arange(100))
        got = backend.attend(batch.q, k_cache, v_cache, m, 0.125)
        batch.keys[0], batch.values[0] = k, v
        errors.append(float((got - contiguous_attention(batch)).norm()))
    assert errors[0] < errors[1] / 3


def test_fp8_stores_the_nearest_number_under_a_scale_for_each_token_and_head():
    backend = TorchBackend(kv_dtype=torch.float8_e4m3fn)
    k, v = torch.randn(2, 30, 2, 64) * torch.rand(30, 2, 1) * 50
    k[7], k[9, 0, 3] = 0.0, 1e30
    slots = torch.randperm(32)[:30]
    caches = backend.kv_cache(2, 16, 2, 64, torch.float32, "cpu")
    assert sum(cache.nbytes for cache in caches) == 32 * backend.kv_token_bytes(2, 64, torch.float32)
    backend.write(k, v, *caches, slots)
    for cache, written in zip(caches, (k, v), strict=True):
        rows = cache.view(torch.uint8).flatten(0, 1)[slots]
        values = rows[..., :64].view(torch.float8_e4m3fn).float()
        scale = rows[..., 64:].contiguous().view(torch.float32)
        torch.testing.assert_close(scale, written.abs().amax(-1, keepdim=True) / 448, rtol=1e-6, atol=0)
        # 3 bits after the point; below 2^-6 the steps are even.
        assert ((values * scale - written).abs() <= written.abs() * 2**-4 * 1.001 + scale * 2**-10 * 1.001).all()


@pytest.mark.parametrize("head_dim", [16, 80])
@pytest.mark.parametrize("block_size", [48, 112, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (52, 1)])
def test_cpu_backend_takes_odd_shapes(isa, heads, kv_heads, head_dim, block_size):
    batch = paged_batch(CpuBackend(), [1, 300, 129, 70], [1, 1, 30, 70], heads, kv_heads, head_dim, block_size)
    torch.testing.assert_close(attend(CpuBackend(), batch), contiguous_attention(batch), rtol=2e-5, atol=5e-6)


@pytest.mark.parametrize("block_size", [16, 48, 256])
def test_long_context_in_parts_equals_sdpa(isa, block_size):
    batch = paged_batch(CpuBackend(), [1500, 513, 2049], [1, 2, 9], 6, 2, 64, block_size)
    torch.testing.assert_close(attend(CpuBackend(), batch), contiguous_attention(batch), rtol=2e-5, atol=5e-6)


@pytest.mark.parametrize("dtype", [torch.float32, *NARROW])
def test_a_sequence_gets_the_same_bits_alone_and_in_a_batch(isa, dtype):
    lens, queries = [200, 700, 31, 90], [1, 1, 31, 12]
    batch = paged_batch(CpuBackend(kv_dtype=dtype), lens, queries, 9, 3, 64, 16)
    together = attend(CpuBackend(), batch)
    m = batch.metadata
    for i in range(len(lens)):
        first, last = m.query_start[i : i + 2].tolist()
        m_alone = type(m)(
            query_start=torch.tensor([0, last - first], dtype=torch.int32),
            seq_lens=m.seq_lens[i : i + 1],
            block_tables=m.block_tables,
            rows=m.rows[i : i + 1],
            slots=m.slots[first:last],
            max_query_len=last - first,
            max_seq_len=lens[i],
        )
        alone = CpuBackend().attend(batch.q[first:last], batch.k_cache, batch.v_cache, m_alone, 0.125)
        assert torch.equal(alone, together[first:last])


@pytest.mark.parametrize("threads", [1, 3])
def test_thread_count_does_not_change_the_bits(threads):
    batch = paged_batch(CpuBackend(), [200, 700, 31], [1, 1, 31], 9, 3, 64, 16)
    expected = attend(CpuBackend(), batch)
    usual = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert torch.equal(attend(CpuBackend(), batch), expected)
    finally:
        torch.set_num_threads(usual)


@pytest.mark.parametrize("backend", [TorchBackend(), CpuBackend()], ids=lambda b: b.name)
@pytest.mark.parametrize("query_lens", [[], [0], [0, 0, 0]])
def test_a_step_without_tokens_is_empty(backend, query_lens):
    cpu_ops.load()
    batch = paged_batch(backend, [5] * len(query_lens), query_lens, 4, 2, 64, 16)
    assert attend(backend, batch).shape == (0, 4, 64)


@pytest.mark.parametrize("block_size", [16, 32])
def test_cpu_write_puts_each_token_in_its_slot_and_skips_minus_one(isa, block_size):
    fast, plain = CpuBackend(), TorchBackend()
    slots = torch.randperm(4 * block_size)[:50]
    slots[::7] = -1
    qkv = torch.randn(50, 8, 64)
    k, v = qkv[:, 4:6], qkv[:, 6:]
    caches = [backend.kv_cache(4, block_size, 2, 64, torch.float32, "cpu") for backend in (fast, plain)]
    for backend, (k_cache, v_cache) in zip((fast, plain), caches, strict=True):
        k_cache.fill_(7.0)
        v_cache.fill_(7.0)
        backend.write(k, v, k_cache, v_cache, slots)
    (k_fast, v_fast), (k_plain, v_plain) = caches
    assert torch.equal(k_fast, k_plain.permute(0, 2, 3, 1))
    assert torch.equal(v_fast, v_plain.permute(0, 2, 1, 3))
    written = torch.zeros(4 * block_size, dtype=torch.bool)
    written[slots[slots >= 0]] = True
    assert (v_plain.flatten(0, 1)[~written] == 7.0).all()
    assert torch.equal(v_plain.flatten(0, 1)[slots[slots >= 0]], v[slots >= 0])


@pytest.mark.parametrize("dtype", NARROW)
def test_rotary_write_to_a_narrow_cache_is_rotary_then_write(isa, dtype):
    backend = CpuBackend(kv_dtype=dtype)
    cos, sin = rotary_table(64, 64, 1e4, "default", {})
    q, k, v = torch.randn(45, 10, 64).split((6, 2, 2), dim=1)
    positions, slots = torch.randint(0, 64, (45,)), torch.randperm(64)[:45]
    fused = backend.kv_cache(4, 16, 2, 64, torch.float32, "cpu")
    turned = backend.rotary_write(q, k, v, cos, sin, positions, *fused, slots)
    q, k = cpu_ops.apply_rotary(q, k, cos, sin, positions)
    apart = backend.kv_cache(4, 16, 2, 64, torch.float32, "cpu")
    backend.write(k, v, *apart, slots)
    assert torch.equal(turned, q)
    assert torch.equal(fused[0], apart[0])
    assert torch.equal(fused[1], apart[1])


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("tokens", [0, 1, 45])
@pytest.mark.parametrize("share", [1, 2])
def test_rotary_write_equals_rotary_then_write(isa, share, tokens, head_dim):
    fast, plain = CpuBackend(), TorchBackend()
    cos, sin = rotary_table(head_dim // share, 64, 1e4, "default", {})
    positions = torch.randint(0, 64, (tokens,))
    slots = torch.randperm(64)[:tokens]
    slots[1::5] = -1
    qkv = torch.randn(tokens, 10, head_dim)
    before = qkv.clone()
    q, k, v = qkv.split((6, 2, 2), dim=1)
    results = []
    for backend in (fast, plain):
        k_cache, v_cache = backend.kv_cache(4, 16, 2, head_dim, torch.float32, "cpu")
        turned = backend.rotary_write(q, k, v, cos, sin, positions, k_cache, v_cache, slots)
        results.append((turned, k_cache, v_cache))
    (q_fast, k_fast, v_fast), (q_plain, k_plain, v_plain) = results
    torch.testing.assert_close(q_fast, q_plain, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(k_fast, k_plain.permute(0, 2, 3, 1), rtol=2e-6, atol=2e-6)
    assert torch.equal(v_fast, v_plain.permute(0, 2, 1, 3))
    assert torch.equal(qkv, before)


def test_chunks_give_the_whole_prompts_answer(isa):
    """A prompt computed 13 tokens at a time, KV written as it goes, equals the prompt computed at once."""
    backend = CpuBackend()
    whole = paged_batch(backend, [90], [90], 6, 2, 64, 16)
    expected = attend(backend, whole)
    m = whole.metadata
    k_cache, v_cache = backend.kv_cache(len(whole.k_cache), 16, 2, 64, torch.float32, "cpu")
    slots = slots_of(m.block_tables[m.rows[0]], 90, 16)
    for first in range(0, 90, 13):
        last = min(first + 13, 90)
        backend.write(whole.keys[0][first:last], whole.values[0][first:last], k_cache, v_cache, slots[first:last])
        m.query_start = torch.tensor([0, last - first], dtype=torch.int32)
        m.seq_lens = torch.tensor([last], dtype=torch.int32)
        got = backend.attend(whole.q[first:last], k_cache, v_cache, m, 0.125)
        torch.testing.assert_close(got, expected[first:last], rtol=1e-5, atol=2e-6)


WINDOWED = ([1, 17, 100, 130, 33, 260, 1500, 900], [1, 17, 0, 40, 2, 1, 3, 200])


@pytest.mark.parametrize("dtype", [torch.float32, *NARROW])
@pytest.mark.parametrize(
    ("window", "soft_cap", "group", "head_dim", "block_size"),
    [
        (0, 2.0, 1, 64, 16),
        (1, 0.0, 3, 16, 48),
        (16, 0.0, 8, 80, 128),
        (65, 2.0, 2, 256, 16),
        (600, 50.0, 9, 64, 256),
        (5000, 0.0, 1, 128, 32),
    ],
)
def test_cpu_backend_with_window_and_soft_cap_equals_torch_backend(
    isa, dtype, window, soft_cap, group, head_dim, block_size
):
    shape = (group, 1, head_dim, block_size)
    backend = CpuBackend(kv_dtype=dtype)
    fast = paged_batch(backend, *WINDOWED, *shape)
    plain = plain_batch(dtype, fast, *WINDOWED, *shape)
    got, expected = (
        b.attend(batch.q, batch.k_cache, batch.v_cache, batch.metadata, 0.3, window, soft_cap)
        for b, batch in ((backend, fast), (TorchBackend(kv_dtype=dtype), plain))
    )
    assert_near(got, expected, dtype, isa)


def test_pages_wholly_before_the_window_are_not_read(isa):
    batch = paged_batch(CpuBackend(), [700, 400], [1, 60], 4, 2, 64, 16)
    m = batch.metadata
    clean = CpuBackend().attend(batch.q, batch.k_cache, batch.v_cache, m, 0.125, 70)
    for sequence, kept in ((0, 700 - 70), (1, 400 - 60 - 69)):
        gone = m.block_tables[m.rows[sequence], : kept // 16].long()
        batch.v_cache[gone] = float("nan")
    assert torch.equal(CpuBackend().attend(batch.q, batch.k_cache, batch.v_cache, m, 0.125, 70), clean)


def test_a_windowed_prompt_in_chunks_gives_the_whole_prompts_answer(isa):
    backend = CpuBackend()
    whole = paged_batch(backend, [300], [300], 6, 2, 64, 16)
    m = whole.metadata
    expected = backend.attend(whole.q, whole.k_cache, whole.v_cache, m, 0.125, 100, 3.0)
    for first in range(0, 300, 37):
        last = min(first + 37, 300)
        m.query_start = torch.tensor([0, last - first], dtype=torch.int32)
        m.seq_lens = torch.tensor([last], dtype=torch.int32)
        got = backend.attend(whole.q[first:last], whole.k_cache, whole.v_cache, m, 0.125, 100, 3.0)
        torch.testing.assert_close(got, expected[first:last], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, *NARROW])
@pytest.mark.parametrize("window", [0, 700])
@pytest.mark.parametrize("block_size", [16, 48, 256])
def test_a_token_gets_the_same_bits_in_a_prompt_and_as_a_decode(isa, block_size, window, dtype):
    """So an answer that is taken up from its tokens goes on as it would have."""
    backend = CpuBackend(kv_dtype=dtype)
    whole = paged_batch(backend, [1700], [1700], 6, 2, 64, block_size)
    options = (whole.k_cache, whole.v_cache, whole.metadata, 0.125, window)
    expected = backend.attend(whole.q, *options)
    m = whole.metadata
    for length in (300, 512, 513, 1100, 1700):
        m.query_start = torch.tensor([0, 1], dtype=torch.int32)
        m.seq_lens = torch.tensor([length], dtype=torch.int32)
        got = backend.attend(whole.q[length - 1 : length].contiguous(), *options)
        assert torch.equal(got[0], expected[length - 1])


@pytest.mark.parametrize("dtype", [torch.float32, *NARROW])
def test_nan_in_a_query_stays_in_its_row(isa, dtype):
    batch = paged_batch(CpuBackend(kv_dtype=dtype), [40, 700], [3, 1], 4, 2, 64, 16)
    clean = attend(CpuBackend(), batch)
    batch.q[1, 2] = float("nan")
    batch.q[3, 0] = float("nan")
    dirty = attend(CpuBackend(), batch)
    assert dirty[1, 2].isnan().all()
    assert dirty[3, 0].isnan().all()
    untouched = ~batch.q.isnan()
    assert torch.equal(dirty[untouched], clean[untouched])


@pytest.mark.parametrize("dtype", NARROW)
def test_nan_in_a_key_or_value_is_not_lost(isa, dtype):
    backend = CpuBackend(kv_dtype=dtype)
    for corrupt_keys in (True, False):
        batch = paged_batch(backend, [150], [1], 6, 2, 64, 16)
        k, v = batch.keys[0][-1:], batch.values[0][-1:]
        (k if corrupt_keys else v)[0, 1] = float("nan")
        slots = slots_of(batch.metadata.block_tables[batch.metadata.rows[0]], 150, 16)
        backend.write(k, v, batch.k_cache, batch.v_cache, slots[-1:])
        got = attend(backend, batch)
        assert got[0, 3:].isnan().all()
        assert not got[0, :3].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, *NARROW])
def test_tokens_stored_together_or_one_by_one_are_the_same(isa, dtype):
    """Neighbours' values share words of the cache: 37 tokens that begin and end within a word."""
    backend = CpuBackend(kv_dtype=dtype)
    k, v = torch.randn(2, 37, 3, 64)
    together, apart = (backend.kv_cache(4, 16, 3, 64, torch.float32, "cpu") for _ in range(2))
    backend.write(k, v, *together, torch.arange(9, 46))
    for i in range(37):
        backend.write(k[i : i + 1], v[i : i + 1], *apart, torch.arange(9 + i, 10 + i))
    assert torch.equal(together[0], apart[0])
    assert torch.equal(together[1], apart[1])


def corrupt(name, value):
    def change(metadata):
        getattr(metadata, name).view(-1)[0] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (corrupt("rows", 99), "row 99 is outside"),
        (corrupt("rows", -1), "row -1 is outside"),
        (corrupt("seq_lens", 2), "queries"),
        (corrupt("seq_lens", 10_000), "tokens at most"),
        (lambda m: m.block_tables.fill_(999), "block 999"),
        (lambda m: m.block_tables.fill_(-1), "block -1"),
        (lambda m: m.query_start.fill_(9), "query_start must go from 0"),
    ],
)
def test_metadata_that_would_read_outside_the_cache_is_refused(change, message):
    cpu_ops.load()
    batch = paged_batch(CpuBackend(), [40, 20], [3, 1], 4, 2, 64, 16)
    change(batch.metadata)
    with pytest.raises((ValueError, IndexError), match=message):
        attend(CpuBackend(), batch)


def test_a_slot_outside_the_cache_is_refused():
    cpu_ops.load()
    k_cache, v_cache = CpuBackend().kv_cache(2, 16, 1, 64, torch.float32, "cpu")
    k = torch.ones(1, 1, 64)
    with pytest.raises(IndexError, match="slot 32 is outside the cache of 32"):
        CpuBackend().write(k, k, k_cache, v_cache, torch.tensor([32]))
    assert not k_cache.any()


@pytest.mark.parametrize(
    ("dtype", "head_dim", "block_size", "name"),
    [
        (torch.float32, 64, 0, "cpu"),
        (torch.float32, 256, 48, "cpu"),
        (torch.float32, 64, 4, "torch"),
        (torch.float32, 64, 144, "torch"),
        (torch.float32, 72, 0, "torch"),
        (torch.bfloat16, 64, 0, "torch"),
    ],
)
def test_select_backend_by_what_the_kernels_support(dtype, head_dim, block_size, name):
    backend = select_backend("cpu", dtype, head_dim, block_size)
    assert backend.name == name
    assert backend.reason
    assert backend.supports_block_size(block_size or backend.default_block_size)


def test_select_backend_refuses_a_negative_block_size():
    with pytest.raises(ValueError, match=r"multiple of 16.*got -16"):
        select_backend("cpu", torch.float32, 64, -16)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "name"),
    [
        (torch.float32, torch.int8, "cpu"),
        (torch.float32, torch.bfloat16, "cpu"),
        (torch.float32, torch.float16, "torch"),
        (torch.bfloat16, torch.int8, "torch"),
    ],
)
def test_select_backend_passes_the_type_of_the_cache_on(dtype, kv_dtype, name):
    backend = select_backend("cpu", dtype, 64, kv_dtype=kv_dtype)
    assert (backend.name, backend.kv_dtype) == (name, kv_dtype)
    assert backend.kv_cache(2, 16, 1, 64, dtype, "cpu")[0].dtype is kv_dtype


def test_select_backend_refuses_a_cache_type_that_none_stores():
    with pytest.raises(ValueError, match=r"float16, int8 or float8_e4m3fn, got torch.float64"):
        select_backend("cpu", torch.float32, 64, kv_dtype=torch.float64)


def test_cpu_cache_of_another_type_is_refused():
    with pytest.raises(ValueError, match=r"float32.*bfloat16"):
        CpuBackend().kv_cache(2, 16, 1, 64, torch.bfloat16, "cpu")
    with pytest.raises(ValueError, match=r"cache of torch.float16"):
        CpuBackend(kv_dtype=torch.float16).kv_cache(2, 16, 1, 64, torch.float32, "cpu")


@pytest.mark.parametrize("kv_dtype", [None, torch.int8])
@pytest.mark.parametrize("backend_type", [TorchBackend, CpuBackend])
def test_rotary_attend_is_rotary_write_then_attend(backend_type, kv_dtype):
    assert cpu_ops.load()
    heads, kv_heads, dim = 9, 3, 64
    backend = backend_type(kv_dtype=kv_dtype)
    batches = [paged_batch(backend, [5, 40], [5, 1], heads, kv_heads, dim, 16) for _ in range(2)]
    rotary = rotary_table(dim, 64, 1e4, "default", {})
    positions = torch.tensor([0, 1, 2, 3, 4, 39])
    qkv = torch.randn(6, (heads + 2 * kv_heads) * dim)
    for batch in batches:
        tables = [batch.metadata.block_tables[row] for row in batch.metadata.rows.tolist()]
        batch.metadata.slots = torch.cat((slots_of(tables[0], 5, 16), slots_of(tables[1], 40, 16)[-1:]))
    one, two = batches
    cache = one.k_cache, one.v_cache
    got = backend.rotary_attend(qkv, heads, kv_heads, rotary, positions, cache, one.metadata, 0.1)
    q, k, v = qkv.unflatten(-1, (-1, dim)).split((heads, kv_heads, kv_heads), dim=1)
    q = backend.rotary_write(q, k, v, *rotary, positions, two.k_cache, two.v_cache, two.metadata.slots)
    assert torch.equal(got, backend.attend(q, two.k_cache, two.v_cache, two.metadata, 0.1).flatten(1))
    for a, b in ((one.k_cache, two.k_cache), (one.v_cache, two.v_cache)):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
