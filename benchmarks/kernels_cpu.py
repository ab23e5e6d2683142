"""Time of each CPU kernel beside plain torch and beside what the machine allows: `python -m benchmarks.kernels_cpu`.

Shapes are SmolLM2-135M's: 30 layers, hidden 576, 9 query and 3 KV heads of 64, MLP 1536, vocabulary 49152. Each layer
has its own weights and cache, so the times are those of a whole step. Best of several runs. Read bandwidth and the
peak rates of multiply-adds (`common/peak.cpp`, built with g++ for this CPU) are measured in the same run.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.common.limits import Row, best_ms, limits
from kernels import activation, argmax, cpu_ops, rms_norm, rotary
from kernels.attention import AttentionBackend, AttentionMetadata
from kernels.attention.cpu_backend import CpuBackend
from kernels.attention.torch_backend import TorchBackend
from kernels.linear import PackedWeight, linear, pack_weight
from kernels.quantized_linear import norm_quantized_linear, quantized_linear
from kernels.quantized_weight import GROUP, QuantizedWeight, quantize_weight

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCAB = 30, 576, 9, 3, 64, 1536, 49152
MAX_SAMPLED = 32  # rows that the head sees of a step: a prompt's other tokens are not sampled
SHAPES = {
    "qkv": ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
    "o": (HIDDEN, HIDDEN),
    "gate_up": (2 * MLP, HIDDEN),
    "down": (HIDDEN, MLP),
}


def attention_step(
    backend: AttentionBackend, batch: int, queries: int, context: int, layers: int
) -> Callable[[], None]:
    g = torch.Generator().manual_seed(0)
    block_size = backend.default_block_size
    blocks = -(-context // block_size)
    caches = [
        backend.kv_cache(batch * blocks, block_size, KV_HEADS, HEAD_DIM, torch.float32, "cpu") for _ in range(layers)
    ]
    k, v = torch.randn(2, batch * blocks * block_size, KV_HEADS, HEAD_DIM, generator=g)
    for k_cache, v_cache in caches:
        backend.write(k, v, k_cache, v_cache, torch.arange(len(k)))
    metadata = AttentionMetadata(
        query_start=torch.arange(batch + 1, dtype=torch.int32) * queries,
        seq_lens=torch.full((batch,), context, dtype=torch.int32),
        block_tables=torch.randperm(batch * blocks, generator=g).int().view(batch, blocks),
        rows=torch.arange(batch, dtype=torch.int32),
        slots=torch.full((batch * queries,), -1),
        max_query_len=queries,
        max_seq_len=context,
    )
    q = torch.randn(batch * queries, HEADS, HEAD_DIM)

    def run() -> None:
        for k_cache, v_cache in caches:
            backend.attend(q, k_cache, v_cache, metadata, HEAD_DIM**-0.5)

    return run


def attention_rows() -> list[Row]:
    rows = []
    for batch, queries, context in ((1, 1, 192), (16, 1, 192), (32, 1, 192), (1, 1, 4096), (1, 512, 512)):
        plain = best_ms(attention_step(TorchBackend(), batch, queries, context, LAYERS))
        for dtype, name in ((torch.float32, ""), (torch.bfloat16, ", bf16"), (torch.int8, ", int8")):
            backend = CpuBackend(kv_dtype=dtype)
            fast = best_ms(attention_step(backend, batch, queries, context, LAYERS))
            read = LAYERS * batch * context * backend.kv_token_bytes(KV_HEADS, HEAD_DIM, torch.float32)
            seen = queries * context - queries * (queries - 1) // 2
            macs = 2 * LAYERS * batch * seen * HEADS * HEAD_DIM
            rows.append(Row("attention", f"{batch} x {queries} of {context}{name}", fast, plain, read, macs))
    return rows


def four_bit_values(shape: tuple[int, int]) -> torch.Tensor:
    """A weight as a GGUF file of Q4_1 holds it."""
    n, k = shape
    codes = torch.randint(0, 16, (n, k // GROUP, GROUP)).float()
    codes[..., 0], codes[..., 1] = 0, 15
    return (codes * 0.0078125 - 0.0625).flatten(1)


STORED: dict[str, Callable[[tuple[int, int]], torch.Tensor]] = {
    "bf16": lambda shape: torch.randn(shape).bfloat16().float(),
    "4 bits": four_bit_values,
}
"""Weights whose packed form is that, by the form's name."""


def linear_rows() -> list[Row]:
    rows = []
    for form, make in STORED.items():
        weights = [make(shape) for shape in SHAPES.values() for _ in range(LAYERS)] + [make((VOCAB, HIDDEN))]
        packed = [pack_weight(weight) for weight in weights]
        read = sum(bytes_of(weight) for weight in packed)
        for tokens in (1, 4, 16, 32, 128):
            inputs = [torch.randn(tokens, weight.shape[1]) for weight in weights]

            def fast(inputs: list[torch.Tensor] = inputs, packed: list[PackedWeight] = packed) -> None:
                for x, weight in zip(inputs, packed, strict=True):
                    linear(x, weight)

            def plain(inputs: list[torch.Tensor] = inputs, weights: list[torch.Tensor] = weights) -> None:
                for x, weight in zip(inputs, weights, strict=True):
                    F.linear(x, weight)

            macs = tokens * sum(weight.numel() for weight in weights)
            case = f"{tokens} tokens, head too, {form}"
            rows.append(Row("linear", case, best_ms(fast), best_ms(plain, 3), read, macs))
    return rows


Packed = torch.Tensor | PackedWeight | QuantizedWeight


def bytes_of(weight: Packed) -> int:
    if isinstance(weight, PackedWeight):
        return bytes_of(weight.data)
    if isinstance(weight, torch.Tensor):
        return weight.nbytes
    read = weight.data.nbytes + weight.scale.nbytes
    if weight.rest is not None:
        return read + weight.rest.data.nbytes
    return read + (0 if weight.offset is None else weight.offset.nbytes)


def quantized_linear_rows() -> list[Row]:
    """As a decoder calls it: SwiGLU within gate_up, norm and residual add before qkv and gate_up."""
    weights = {name: [STORED["bf16"](shape) for _ in range(LAYERS)] for name, shape in SHAPES.items()}
    weights["head"] = [STORED["bf16"]((VOCAB, HIDDEN))]
    exact = {name: [pack_weight(weight) for weight in group] for name, group in weights.items()}
    head = [quantize_weight(weights["head"][0])]
    forms = {
        "8 bits": {
            name: [quantize_weight(weight, gated=name == "gate_up") for weight in weights[name]] for name in SHAPES
        },
        "4 bits": {
            name: [quantize_weight(four_bit_values(shape), gated=name == "gate_up") for _ in range(LAYERS)]
            for name, shape in SHAPES.items()
        },
    }
    norm = torch.ones(HIDDEN)
    in_layers, in_head = LAYERS * sum(n * k for n, k in SHAPES.values()), VOCAB * HIDDEN
    rows = []
    for tokens in (1, 4, 16, 32, 128, 512):
        narrow, wide = torch.randn(tokens, HIDDEN), torch.randn(tokens, MLP)

        def plain(narrow: torch.Tensor = narrow, wide: torch.Tensor = wide) -> None:
            for i in range(LAYERS):
                linear(rms_norm.add_rms_norm(narrow, narrow, norm, 1e-5)[0], exact["qkv"][i])
                linear(narrow, exact["o"][i])
                normed, _ = rms_norm.add_rms_norm(narrow, narrow, norm, 1e-5)
                activation.silu_and_mul(linear(normed, exact["gate_up"][i]))
                linear(wide, exact["down"][i])
            linear(narrow[:MAX_SAMPLED], exact["head"][0])

        repeats = 20 if tokens <= 32 else 5
        plain_ms = best_ms(plain, repeats)
        macs = tokens * in_layers + min(tokens, MAX_SAMPLED) * in_head
        for form, layers in forms.items():

            def fast(
                narrow: torch.Tensor = narrow,
                wide: torch.Tensor = wide,
                layers: dict[str, list[QuantizedWeight]] = layers,
            ) -> None:
                for i in range(LAYERS):
                    norm_quantized_linear(narrow, narrow, norm, 1e-5, layers["qkv"][i])
                    quantized_linear(narrow, layers["o"][i])
                    norm_quantized_linear(narrow, narrow, norm, 1e-5, layers["gate_up"][i])
                    quantized_linear(wide, layers["down"][i])
                quantized_linear(narrow[:MAX_SAMPLED], head[0])

            read = sum(bytes_of(weight) for group in (*layers.values(), head) for weight in group)
            case = f"{tokens} tokens, head too, {form}"
            rows.append(Row("quantized_linear", case, best_ms(fast, repeats), plain_ms, read, macs, "int8"))
    return rows


def elementwise_rows() -> list[Row]:
    rows = []
    weight = torch.ones(HIDDEN)
    cos, sin = rotary.rotary_table(HEAD_DIM, 8192, 1e5, "default", {})
    for tokens in (1, 32, 512):
        x, residual, gate_up = torch.randn(tokens, HIDDEN), torch.randn(tokens, HIDDEN), torch.randn(tokens, 2 * MLP)
        qkv = torch.randn(tokens, HEADS + 2 * KV_HEADS, HEAD_DIM)
        q, k, v = qkv.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        positions, slots = torch.arange(tokens), torch.arange(tokens)
        backends = (CpuBackend(), TorchBackend())
        caches = [b.kv_cache(32, 16, KV_HEADS, HEAD_DIM, torch.float32, "cpu") for b in backends]
        arguments = (q, k, v, cos, sin, positions)
        pairs: dict[str, tuple[Callable[[], object], Callable[[], object], int]] = {
            "add_rms_norm": (
                partial(rms_norm.add_rms_norm, x, residual, weight, 1e-5),
                partial(rms_norm.add_reference, x, residual, weight, 1e-5),
                4 * x.nbytes,
            ),
            "silu_and_mul": (
                partial(activation.silu_and_mul, gate_up),
                partial(activation.reference, gate_up),
                gate_up.nbytes * 3 // 2,
            ),
            "rotary_write": (
                partial(backends[0].rotary_write, *arguments, *caches[0], slots),
                partial(backends[1].rotary_write, *arguments, *caches[1], slots),
                2 * qkv.nbytes,
            ),
        }
        for op, (fast, plain, moved) in pairs.items():
            fast_ms, plain_ms = best_ms(fast, 50) * LAYERS, best_ms(plain, 50) * LAYERS
            rows.append(Row(op, f"{tokens} tokens", fast_ms, plain_ms, LAYERS * moved))
    return rows


def argmax_rows() -> list[Row]:
    """Once a step, not once a layer."""
    rows = []
    for tokens in (1, 32):
        x = torch.randn(tokens, VOCAB)
        fast_ms, plain_ms = best_ms(partial(argmax.argmax, x), 50), best_ms(partial(argmax.reference, x), 50)
        rows.append(Row("argmax", f"{tokens} tokens", fast_ms, plain_ms, x.nbytes))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--threads", type=int, default=0, help="0 keeps torch's own choice")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    if not cpu_ops.load():
        raise SystemExit("the C++ kernels are not built; `python -m kernels.build` says why")
    found = limits()
    rows = [*attention_rows(), *linear_rows(), *quantized_linear_rows(), *elementwise_rows(), *argmax_rows()]
    if args.json:
        isa = cpu_ops.use_isa("best")
        figures = {"isa": isa, "threads": torch.get_num_threads(), **asdict(found)}
        print(json.dumps({**figures, "rows": [asdict(row) for row in rows]}))
        return
    peaks = ", ".join(f"{rate / 1e6:.0f} GMAC/s {name}" for name, rate in found.macs_per_ms.items())
    print(
        f"{torch.get_num_threads()} threads, {found.bytes_per_ms / 1e6:.1f} GB/s read, {peaks}; ms for {LAYERS} layers"
    )
    print(f"{'op':<18}{'case':<34}{'kernel':>9}{'torch':>9}{'GB/s':>7}{'of it':>6}{'GMAC/s':>8}{'of it':>6}")
    for row in rows:
        of_bandwidth, of_peak = found.shares(row)
        print(
            f"{row.op:<18}{row.case:<34}{row.kernel_ms:>9.3f}{row.torch_ms:>9.3f}"
            f"{row.read_bytes / row.kernel_ms / 1e6:>7.1f}{of_bandwidth:>6.0%}"
            f"{row.macs / row.kernel_ms / 1e6:>8.1f}{of_peak:>6.0%}"
        )


if __name__ == "__main__":
    main()
