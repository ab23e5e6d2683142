"""Each GPU kernel on the card against its definition in torch, over random shapes. Needs a card."""

import dataclasses
import random

import numpy as np
import pytest
import torch

from kernels import activation, bitmask, experts, gpu, lora, rms_norm, sampler
from kernels.attention import HeadNorms, select_backend
from kernels.attention.backend import FP8
from kernels.attention.flash_backend import Flash2Backend, Flash3Backend
from kernels.attention.select import installed
from kernels.attention.torch_backend import TorchBackend
from kernels.attention.triton_backend import TritonBackend
from kernels.gpu import kv_formats
from kernels.rotary import rotary_table
from tests.kernels.paged import paged_batch

if not torch.cuda.is_available():
    pytest.skip("there is no GPU that torch can use", allow_module_level=True)

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = list(TOLERANCE)
SEEDS = range(4)


def card():
    return gpu.describe(torch.device("cuda"))


def close(got, expected, factor=1.0):
    assert not got.isnan().any()
    error = (got.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30)
    assert error <= factor * TOLERANCE[got.dtype], float(error)


def randn(*shape, dtype=torch.float32, scale=1.0):
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


@pytest.fixture(params=SEEDS, ids=lambda seed: f"seed{seed}")
def rng(request):
    torch.manual_seed(request.param)
    return random.Random(request.param)


@pytest.mark.parametrize("dtype", DTYPES)
def test_elementwise(rng, dtype):
    tokens, n = rng.choice([1, 7, 300]), rng.choice([64, 576, 1000, 4096])
    x, residual, weight = randn(tokens, n, dtype=dtype), randn(tokens, n, dtype=dtype), randn(n, dtype=dtype)
    close(rms_norm.rms_norm(x, weight, 1e-6), rms_norm.reference(x, weight, 1e-6))
    normed, total = rms_norm.add_rms_norm(x, residual, weight, 1e-6)
    close(normed, rms_norm.add_reference(x, residual, weight, 1e-6)[0])
    assert torch.equal(total, residual + x)
    both = randn(tokens, 2 * n, dtype=dtype, scale=4.0)
    close(activation.silu_and_mul(both), activation.reference(both))
    close(activation.gelu_and_mul(both), activation.gelu_reference(both))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", [None, torch.int8, FP8])
def test_norm_rotary_and_store(rng, dtype, stored):
    tokens, heads, kv_heads, head_dim = rng.choice([1, 40]), *rng.choice([(16, 8, 128), (9, 3, 64), (10, 1, 96)])
    block_size, rotary_dim = rng.choice([16, 32]), head_dim // rng.choice([1, 2])
    q, k, v = randn(tokens, heads + 2 * kv_heads, head_dim, dtype=dtype).split((heads, kv_heads, kv_heads), dim=1)
    norms = HeadNorms(randn(head_dim, dtype=dtype), randn(head_dim, dtype=dtype), 1e-6) if rng.random() < 0.5 else None
    cos, sin = (table.cuda() for table in rotary_table(rotary_dim, 512, 1e4, "default", {}))
    positions, slots = torch.randint(0, 512, (tokens,)).cuda(), torch.randperm(64)[:tokens].cuda()
    turned, contents = [], []
    for backend in (TritonBackend(kv_dtype=stored, gpu=card()), TorchBackend(kv_dtype=stored)):
        caches = backend.kv_cache(64 // block_size, block_size, kv_heads, head_dim, dtype, "cuda")
        turned.append(backend.norm_rotary_write(q, k, v, norms, cos, sin, positions, *caches, slots))
        contents.append([plain(backend, cache, head_dim) for cache in caches])
    close(turned[0], turned[1])
    for got, expected in zip(*contents, strict=True):
        coarse = {None: 1.0, torch.int8: 1e3, FP8: 5e3}[stored] if dtype is torch.float32 else 3.0
        close(got.to(dtype), expected.to(dtype), coarse)


def plain(backend, cache, head_dim):
    """[blocks, block_size, kv_heads, head_dim] of either layout, 8 bits multiplied out."""
    if backend.name == "torch":
        if cache.itemsize > 1:
            return cache
        raw = cache.view(torch.uint8)
        scale = raw[..., head_dim:].contiguous().view(torch.float32)
        return raw[..., :head_dim].contiguous().view(cache.dtype).float() * scale
    if cache.itemsize > 1:
        return cache.transpose(1, 2)
    pages, block_size = cache.view(torch.uint8).flatten(2), cache.shape[2]
    values = pages[..., : block_size * head_dim].unflatten(2, (block_size, head_dim)).contiguous().view(cache.dtype)
    scale = pages[..., block_size * head_dim :].contiguous().view(torch.float32)
    return (values.float() * scale[..., None]).transpose(1, 2)


def lengths(rng, decode):
    lens = [rng.choice([1, 17, 100, 700, 3000]) for _ in range(rng.choice([1, 3, 20]))]
    return lens, [1 if decode else rng.choice([0, 1, min(n, 5), n]) for n in lens]


def check_attention(rng, backend, dtype, decode, head_dims, factor=1.0):
    lens, queries = lengths(rng, decode)
    heads, kv_heads = rng.choice([(16, 8), (9, 3), (8, 1), (14, 2)])
    head_dim = rng.choice(head_dims)
    block_size = backend.default_block_size * rng.choice([1, 2])
    window, soft_cap = rng.choice([(0, 0.0), (0, 0.0), (64, 0.0), (0, 20.0), (300, 20.0)])
    plain_backend = TorchBackend(kv_dtype=backend.kv_dtype)
    outputs = []
    for each in (backend, plain_backend):
        batch = paged_batch(plain_backend, lens, queries, heads, kv_heads, head_dim, block_size, 5)
        pair = each.kv_cache(len(batch.k_cache), block_size, kv_heads, head_dim, dtype, "cuda")
        metadata = dataclasses.replace(
            batch.metadata,
            **{name: getattr(batch.metadata, name).cuda()
               for name in ("query_start", "seq_lens", "block_tables", "rows", "slots")},
        )  # fmt: skip
        for row, keys, values in zip(batch.metadata.rows.tolist(), batch.keys, batch.values, strict=True):
            positions = torch.arange(len(keys))
            slots = batch.metadata.block_tables[row].long()[positions // block_size] * block_size
            each.write(keys.cuda().to(dtype), values.cuda().to(dtype), *pair, (slots + positions % block_size).cuda())
        q = batch.q.cuda().to(dtype)
        outputs.append(each.attend(q, *pair, metadata, head_dim**-0.5, window, soft_cap))
    close(*outputs, factor)
    assert not outputs[0][-5:].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", [None, torch.bfloat16, torch.int8, FP8])
@pytest.mark.parametrize("decode", [True, False])
def test_triton_attention(rng, dtype, stored, decode):
    factor = 10.0 if dtype is torch.float32 else 1.0  # three products of tf32; 8-bit rounding may fall to either side
    check_attention(rng, TritonBackend(kv_dtype=stored, gpu=card()), dtype, decode, [64, 80, 128, 256], factor)


@pytest.mark.parametrize("decode", [True, False])
@pytest.mark.parametrize("kind", [Flash2Backend, Flash3Backend])
def test_flash_attention_where_it_is_installed(rng, kind, decode):
    if kind.package not in installed() or not kind.supports_model(card().capability, torch.bfloat16, 128):
        pytest.skip(f"{kind.package} is not installed, or not for this card")
    check_attention(rng, kind(), torch.bfloat16, decode, [64, 128])


def test_the_choice_for_this_card_is_not_the_slow_one():
    assert select_backend("cuda", torch.float16, 128).name != "torch"
    assert kv_formats.kv_format(FP8, card().capability) in (kv_formats.FP8_NATIVE.value, kv_formats.FP8_BITS.value)


@pytest.mark.parametrize("dtype", DTYPES)
def test_experts(rng, dtype):
    if card().capability < (8, 0):
        pytest.skip("compute capability 7.5 has no such kernel: its experts run one by one")
    tokens, count, per_token = rng.choice([1, 9, 200]), *rng.choice([(8, 2), (60, 4), (128, 8)])
    hidden, inner, gelu = rng.choice([256, 576]), rng.choice([96, 768]), rng.random() < 0.5
    weights, chosen = torch.randn(tokens, count, device="cuda").softmax(-1).topk(per_token)
    given = (
        randn(tokens, hidden, dtype=dtype),
        randn(count, 2 * inner, hidden, dtype=dtype, scale=hidden**-0.5),
        randn(count, hidden, inner, dtype=dtype, scale=inner**-0.5),
    )
    got = experts.experts_mlp(*given, chosen, weights.to(dtype), gelu)
    exact = experts.reference(*(each.double() for each in given), chosen, weights.to(dtype).double(), gelu)
    close(got, exact, 10.0 if dtype is torch.float32 else 1.0)  # three products of tf32


@pytest.mark.parametrize("dtype", DTYPES)
def test_adapters_of_a_mixed_batch(rng, dtype):
    tokens, k = rng.choice([1, 40, 300]), rng.choice([576, 1000])
    rank, parts = rng.choice([(8, (576, 192, 192)), (64, (1536, 1536)), (16, (1000,))])
    weights = lora.lora_weights(3, rank, k, parts, dtype=dtype, device=torch.device("cuda"))
    weights.a.normal_(0.0, k**-0.5)
    weights.b.normal_(0.0, rank**-0.5)
    slots = np.array([rng.randint(-1, 2) for _ in range(tokens)], dtype=np.int32)
    order, tiles = (torch.from_numpy(array).cuda() for array in lora.lora_tiles(slots))
    x, y = randn(tokens, k, dtype=dtype), randn(tokens, sum(parts), dtype=dtype)
    exact, before = y.double(), y.clone()
    doubles = dataclasses.replace(weights, a=weights.a.double(), b=weights.b.double())
    lora.reference(exact, x.double(), doubles, lora.LoraTokens(order, tiles))
    lora.add_lora(y, x, weights, lora.LoraTokens(order, tiles))
    close(y, exact)
    without = torch.from_numpy(slots < 0).cuda()
    assert torch.equal(y[without], before[without])


def test_sampler_draws_the_tokens_of_the_definition(rng):
    n, vocab = rng.choice([1, 64]), rng.choice([1000, 49_152, 151_936])
    logits = randn(n, vocab, scale=rng.choice([1.0, 4.0]))
    rows = torch.randperm(100)[:n].cuda()
    temperature = torch.rand(100).cuda() + 0.3
    temperature[::7] = 0.0
    top_k = (torch.randint(0, 2, (100,)) * torch.randint(1, 500, (100,))).int().cuda()
    top_p, min_p = 1 - torch.rand(100).cuda() * 0.6, torch.rand(100).cuda() * 0.05
    seeds, positions = torch.randint(-(2**60), 2**60, (100,)).cuda(), torch.arange(n).cuda()
    for filters in (None, (top_k, top_p, min_p)):
        got = sampler.choose(logits.clone(), rows, temperature, seeds, positions, filters).cpu()
        on_cpu = None if filters is None else tuple(each.cpu() for each in filters)
        expected = sampler.choose(
            logits.cpu(), rows.cpu(), temperature.cpu(), seeds.cpu(), positions.cpu(), on_cpu
        )  # fmt: skip
        # A sum in another order may move a token whose number falls on the border of two.
        assert (got != expected).sum() <= max(1, n // 50)
    assert torch.equal(sampler.argmax(logits), logits.argmax(-1))


def test_logprobs_masks_and_penalties(rng):
    n, vocab = rng.choice([1, 9]), rng.choice([1000, 151_936])
    logits = randn(n, vocab, scale=3.0)
    tokens = torch.randint(0, vocab, (n,)).cuda()
    got = sampler.logprobs_of(logits, tokens, 20)
    expected = sampler.token_logprobs(logits.double().log_softmax(-1), tokens, 20)
    assert torch.equal(got.token_ids, expected.token_ids)
    assert torch.equal(got.ranks, expected.ranks)
    assert (got.logprobs - expected.logprobs).abs().max() < 1e-4
    mask = torch.randint(-(2**31), 2**31, (n, -(-vocab // 32))).int().cuda()
    masked, reference = logits.clone(), logits.clone()
    bitmask.apply_bitmask(masked, mask)
    bitmask.reference(reference, mask)
    assert torch.equal(masked, reference)
    seen = torch.randint(0, 6, (3, vocab)).int().cuda()
    penalties, at, slots = torch.rand(3, 3).cuda() + 0.5, torch.arange(n).cuda(), torch.arange(n).cuda() % 3
    changed, reference = logits.clone(), logits.cpu()
    sampler.penalise_rows(changed, at, seen, slots, penalties)
    sampler.penalise_rows(reference, at.cpu(), seen.cpu(), slots.cpu(), penalties.cpu())
    close(changed.cpu(), reference)
