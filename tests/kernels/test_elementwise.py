"""Norms, activation and rotary embedding: C++ against the torch definition, and the definition against transformers."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from kernels import activation, cpu_ops, rms_norm, rotary

WIDTHS = (8, 64, 576, 577)


def close(a, b):
    torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("tokens", [0, 1, 5, 40])
def test_rms_norm_equals_reference_and_keeps_its_input(isa, tokens, n):
    x, weight = torch.randn(tokens, n), torch.randn(n)
    before = x.clone()
    close(rms_norm.rms_norm(x, weight, 1e-5), rms_norm.reference(before, weight, 1e-5))
    assert torch.equal(x, before)


def test_rms_norm_takes_heads_sliced_from_a_fused_projection(isa):
    fused = torch.randn(7, 10, 64)
    k, weight = fused[:, 4:7], torch.randn(64)
    assert not k.is_contiguous()
    close(rms_norm.rms_norm(k, weight, 1e-6), rms_norm.reference(k, weight, 1e-6))


@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("tokens", [0, 1, 40])
def test_add_rms_norm_equals_reference_and_keeps_its_inputs(isa, tokens, n):
    x, residual, weight = torch.randn(tokens, n), torch.randn(tokens, n), torch.randn(n)
    before = x.clone(), residual.clone()
    normed, total = rms_norm.add_rms_norm(x, residual, weight, 1e-5)
    close(normed, rms_norm.add_reference(*before, weight, 1e-5)[0])
    assert torch.equal(total, before[1] + before[0])
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rms_norm_reference_equals_transformers(dtype):
    x = torch.randn(6, 96).to(dtype)
    module = LlamaRMSNorm(96, eps=1e-5).to(dtype)
    module.weight.data = torch.randn(96).to(dtype)
    assert torch.equal(rms_norm.reference(x, module.weight.data, 1e-5), module(x))


@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("tokens", [0, 1, 40])
def test_silu_and_mul_equals_reference(isa, tokens, n):
    x = torch.randn(tokens, 2 * n) * 20
    before = x.clone()
    torch.testing.assert_close(activation.silu_and_mul(x), activation.reference(before), rtol=3e-6, atol=1e-6)
    assert torch.equal(x, before)


def test_silu_and_mul_of_extreme_values_stays_finite_and_keeps_nan(isa):
    x = torch.tensor([[-1e30, -200.0, -100.0, 0.0, 100.0, 1e30, float("nan"), 1.0] + [1.0] * 8])
    out = activation.silu_and_mul(x)
    assert out[0, :6].isfinite().all()
    assert out[0, 6].isnan()
    torch.testing.assert_close(out[0, 2:6], activation.reference(x)[0, 2:6])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_take_the_reference_and_keep_their_type(dtype):
    x = torch.randn(3, 64).to(dtype)
    assert not cpu_ops.usable(x)
    assert rms_norm.rms_norm(x, torch.ones(64, dtype=dtype), 1e-5).dtype is dtype
    assert activation.silu_and_mul(x).dtype is dtype
    q = x.view(3, 1, 64)
    cos, sin = rotary.rotary_table(64, 8, 1e4, "default", {})
    assert rotary.apply_rotary(q, q, cos, sin, torch.arange(3))[0].dtype is dtype


@pytest.mark.parametrize("head_dim", [16, 24, 64, 128, 256])
@pytest.mark.parametrize("tokens", [0, 1, 37])
def test_rotary_equals_reference_and_keeps_its_inputs(isa, tokens, head_dim):
    cos, sin = rotary.rotary_table(head_dim, 100, 1e4, "default", {})
    fused = torch.randn(tokens, 8, head_dim)
    q, k = fused[:, :6], fused[:, 6:]
    positions = torch.randint(0, 100, (tokens,))
    before = fused.clone()
    for got, expected in zip(
        rotary.apply_rotary(q, k, cos, sin, positions), rotary.reference(q, k, cos, sin, positions), strict=True
    ):
        close(got, expected)
    assert torch.equal(fused, before)


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


ORIGINAL = {"original_max_position_embeddings": 128}
LISTS = {"short_factor": [1.0 + i / 32 for i in range(32)], "long_factor": [2.0 + i / 8 for i in range(32)]}
SCALED = {
    "default": ("default", {}),
    "linear": ("linear", {"factor": 4.0}),
    "dynamic": ("dynamic", {"factor": 2.0}),
    "llama3": ("llama3", LLAMA3),
    "yarn": ("yarn", {"factor": 4.0, **ORIGINAL}),
    "yarn, all set": (
        "yarn",
        {"factor": 4.0, "beta_fast": 16, "beta_slow": 2, "truncate": False, "mscale": 0.7, "mscale_all_dim": 0.9}
        | ORIGINAL,
    ),
    "yarn, factor of attention": ("yarn", {"factor": 4.0, "attention_factor": 1.5, **ORIGINAL}),
    "longrope, long": ("longrope", {"factor": 4.0, **ORIGINAL, **LISTS}),
    "longrope, short": ("longrope", {"factor": 4.0, "original_max_position_embeddings": 512, **LISTS}),
}


@pytest.mark.parametrize("case", SCALED)
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_rotary_equals_transformers(case, theta):
    kind, parameters = SCALED[case]
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        head_dim=64,
        max_position_embeddings=256,
        rope_parameters={"rope_type": kind, "rope_theta": theta, **parameters},
    )
    parameters = parameters | {"max_position_embeddings": 256}
    positions = torch.arange(512)
    cos, sin = rotary.rotary_table(64, 512, theta, kind, parameters)
    q, k = torch.randn(512, 4, 64), torch.randn(512, 2, 64)
    their_cos, their_sin = LlamaRotaryEmbedding(config)(q, positions[None])
    torch.testing.assert_close(cos, their_cos[0, :, :32], rtol=0, atol=1e-6)
    torch.testing.assert_close(sin, their_sin[0, :, :32], rtol=0, atol=1e-6)
    theirs = apply_rotary_pos_emb(q[None], k[None], their_cos, their_sin, unsqueeze_dim=2)
    for got, expected in zip(rotary.apply_rotary(q, k, cos, sin, positions), theirs, strict=True):
        torch.testing.assert_close(got, expected[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(96, 72), (64, 16), (64, 0)])
def test_rotary_over_a_part_of_the_head_leaves_the_rest(isa, head_dim, rotary_dim):
    cos, sin = rotary.rotary_table(rotary_dim, 50, 1e4, "default", {})
    q, k = torch.randn(20, 9, head_dim).split((6, 3), dim=1)
    positions = torch.randint(0, 50, (20,))
    turned = rotary.reference(q[..., :rotary_dim], k[..., :rotary_dim], cos, sin, positions)
    for apply in (rotary.apply_rotary, rotary.reference):
        for got, x, part in zip(apply(q, k, cos, sin, positions), (q, k), turned, strict=True):
            close(got[..., :rotary_dim], part)
            assert torch.equal(got[..., rotary_dim:], x[..., rotary_dim:])


def test_rotary_refuses_what_it_cannot_do():
    with pytest.raises(ValueError, match=r"default, linear, .*'su'"):
        rotary.rotary_table(64, 8, 1e4, "su", {})
    with pytest.raises(ValueError, match="32 numbers in each of its lists, got 3"):
        rotary.rotary_table(
            64, 8, 1e4, "longrope", {"factor": 2.0, "short_factor": [1.0] * 3, "long_factor": [], **ORIGINAL}
        )
    with pytest.raises(ValueError, match="missing: high_freq_factor"):
        rotary.rotary_table(64, 8, 1e4, "llama3", {k: v for k, v in LLAMA3.items() if k != "high_freq_factor"})
    cos, sin = rotary.rotary_table(64, 8, 1e4, "default", {})
    with pytest.raises(IndexError, match="position 8 is outside"):
        rotary.apply_rotary(torch.zeros(1, 1, 64), torch.zeros(1, 1, 64), cos, sin, torch.tensor([8]))


def test_wrong_shapes_are_refused_not_read():
    with pytest.raises(ValueError, match="weight must be"):
        rms_norm.rms_norm(torch.zeros(2, 8), torch.zeros(7), 1e-5)
    with pytest.raises(ValueError, match="one shape"):
        rms_norm.add_rms_norm(torch.zeros(2, 8), torch.zeros(3, 8), torch.zeros(8), 1e-5)
    with pytest.raises(ValueError, match="2 \\* n"):
        activation.silu_and_mul(torch.zeros(2, 7))
