"""Time of each CPU kernel beside plain torch and beside what memory allows: `python -m benchmarks.kernels_cpu`.

Shapes are SmolLM2-135M's: 30 layers, hidden 576, 9 query and 3 KV heads of 64, MLP 1536, vocabulary 49152. Each layer
has its own weights and cache, so the times are those of a whole step. Best of several runs.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F

from kernels import activation, cpu_ops, rms_norm, rotary
from kernels.attention import AttentionBackend, AttentionMetadata
from kernels.attention.cpu_backend import CpuBackend
from kernels.attention.torch_backend import TorchBackend
from kernels.linear import linear, pack_weight
from kernels.quantized_linear import norm_quantized_linear, quantize_weight, quantized_linear

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCAB = 30, 576, 9, 3, 64, 1536, 49152
MAX_SAMPLED = 32  # rows that the head sees of a step: a prompt's other tokens are not sampled
SHAPES = {
    "qkv": ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
    "o": (HIDDEN, HIDDEN),
    "gate_up": (2 * MLP, HIDDEN),
    "down": (HIDDEN, MLP),
}


@dataclass
class Row:
    """Milliseconds for all layers of a step; bound_ms is bytes read over the measured read bandwidth.

    torch_ms is of plain torch in float32, but for `quantized_linear` of the packed float32 kernel (bfloat16 weights).
    """

    op: str
    case: str
    kernel_ms: float
    torch_ms: float
    bound_ms: float


def best_ms(run: Callable[[], object], repeats: int = 5) -> float:
    run()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times) * 1e3


def read_bandwidth() -> float:
    """Bytes a millisecond that all threads together read from memory."""
    data = torch.ones(128 << 20, dtype=torch.float32)
    return data.nbytes / best_ms(data.sum, 20)


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


def attention_rows(bytes_per_ms: float) -> list[Row]:
    rows = []
    for batch, queries, context in ((1, 1, 192), (16, 1, 192), (32, 1, 192), (1, 1, 4096), (1, 512, 512)):
        plain = best_ms(attention_step(TorchBackend(), batch, queries, context, LAYERS))
        for dtype, name in ((torch.float32, ""), (torch.bfloat16, ", bf16"), (torch.int8, ", int8")):
            backend = CpuBackend(kv_dtype=dtype)
            fast = best_ms(attention_step(backend, batch, queries, context, LAYERS))
            read = LAYERS * batch * context * backend.kv_token_bytes(KV_HEADS, HEAD_DIM, torch.float32)
            rows.append(Row("attention", f"{batch} x {queries} of {context}{name}", fast, plain, read / bytes_per_ms))
    return rows


def linear_rows(bytes_per_ms: float) -> list[Row]:
    weights = [torch.randn(shape).bfloat16().float() for shape in SHAPES.values() for _ in range(LAYERS)]
    weights.append(torch.randn(VOCAB, HIDDEN).bfloat16().float())
    packed = [pack_weight(weight) for weight in weights]
    read = sum(weight.numel() for weight in weights) * 2
    rows = []
    for tokens in (1, 4, 16, 32, 128):
        inputs = [torch.randn(tokens, weight.shape[1]) for weight in weights]

        def fast(inputs: list[torch.Tensor] = inputs) -> None:
            for x, weight in zip(inputs, packed, strict=True):
                linear(x, weight)

        def plain(inputs: list[torch.Tensor] = inputs) -> None:
            for x, weight in zip(inputs, weights, strict=True):
                F.linear(x, weight)

        rows.append(Row("linear", f"{tokens} tokens, head too", best_ms(fast), best_ms(plain, 3), read / bytes_per_ms))
    return rows


def quantized_linear_rows(bytes_per_ms: float) -> list[Row]:
    """As a decoder calls it: SwiGLU within gate_up, norm and residual add before qkv and gate_up."""
    weights = {name: [torch.randn(shape).bfloat16().float() for _ in range(LAYERS)] for name, shape in SHAPES.items()}
    weights["head"] = [torch.randn(VOCAB, HIDDEN).bfloat16().float()]
    exact = {name: [pack_weight(weight) for weight in group] for name, group in weights.items()}
    quantized = {
        name: [quantize_weight(weight, gated=name == "gate_up") for weight in group] for name, group in weights.items()
    }
    read = sum(w.data.nbytes + w.scale.nbytes for group in quantized.values() for w in group)
    norm = torch.ones(HIDDEN)
    rows = []
    for tokens in (1, 4, 16, 32, 128, 512):
        narrow, wide = torch.randn(tokens, HIDDEN), torch.randn(tokens, MLP)

        def fast(narrow: torch.Tensor = narrow, wide: torch.Tensor = wide) -> None:
            for i in range(LAYERS):
                norm_quantized_linear(narrow, narrow, norm, 1e-5, quantized["qkv"][i])
                quantized_linear(narrow, quantized["o"][i])
                norm_quantized_linear(narrow, narrow, norm, 1e-5, quantized["gate_up"][i])
                quantized_linear(wide, quantized["down"][i])
            quantized_linear(narrow[:MAX_SAMPLED], quantized["head"][0])

        def plain(narrow: torch.Tensor = narrow, wide: torch.Tensor = wide) -> None:
            for i in range(LAYERS):
                linear(rms_norm.add_rms_norm(narrow, narrow, norm, 1e-5)[0], exact["qkv"][i])
                linear(narrow, exact["o"][i])
                normed, _ = rms_norm.add_rms_norm(narrow, narrow, norm, 1e-5)
                activation.silu_and_mul(linear(normed, exact["gate_up"][i]))
                linear(wide, exact["down"][i])
            linear(narrow[:MAX_SAMPLED], exact["head"][0])

        repeats = 20 if tokens <= 32 else 5
        times = best_ms(fast, repeats), best_ms(plain, repeats)
        rows.append(Row("quantized_linear", f"{tokens} tokens, head too", *times, read / bytes_per_ms))
    return rows


def elementwise_rows(bytes_per_ms: float) -> list[Row]:
    rows = []
    weight = torch.ones(HIDDEN)
    cos, sin = rotary.rotary_table(HEAD_DIM, 8192, 1e5, "default", {})
    for tokens in (1, 32, 512):
        x, residual, gate_up = torch.randn(tokens, HIDDEN), torch.randn(tokens, HIDDEN), torch.randn(tokens, 2 * MLP)
        qkv = torch.randn(tokens, HEADS + 2 * KV_HEADS, HEAD_DIM)
        q, k, v = qkv.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        positions, slots = torch.arange(tokens), torch.arange(tokens)
        caches = [b.kv_cache(32, 16, KV_HEADS, HEAD_DIM, torch.float32, "cpu") for b in (CpuBackend(), TorchBackend())]
        arguments = (q, k, v, cos, sin, positions)
        pairs: dict[str, tuple[Callable[[], object], Callable[[], object], int]] = {
            "add_rms_norm": (
                lambda x=x, r=residual: rms_norm.add_rms_norm(x, r, weight, 1e-5),
                lambda x=x, r=residual: rms_norm.add_reference(x, r, weight, 1e-5),
                4 * x.nbytes,
            ),
            "silu_and_mul": (
                lambda x=gate_up: activation.silu_and_mul(x),
                lambda x=gate_up: activation.reference(x),
                gate_up.nbytes * 3 // 2,
            ),
            "rotary_write": (
                lambda a=arguments, c=caches[0], s=slots: CpuBackend().rotary_write(*a, *c, s),
                lambda a=arguments, c=caches[1], s=slots: TorchBackend().rotary_write(*a, *c, s),
                2 * qkv.nbytes,
            ),
        }
        for op, (fast, plain, moved) in pairs.items():
            times = [best_ms(run, 50) * LAYERS for run in (fast, plain)]
            rows.append(Row(op, f"{tokens} tokens", *times, LAYERS * moved / bytes_per_ms))
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
    bytes_per_ms = read_bandwidth()
    rows = [
        *attention_rows(bytes_per_ms),
        *linear_rows(bytes_per_ms),
        *quantized_linear_rows(bytes_per_ms),
        *elementwise_rows(bytes_per_ms),
    ]
    if args.json:
        isa = cpu_ops.use_isa("best")
        figures = {"isa": isa, "threads": torch.get_num_threads(), "read_gb_s": round(bytes_per_ms / 1e6, 1)}
        print(json.dumps({**figures, "rows": [asdict(row) for row in rows]}))
        return
    print(f"{torch.get_num_threads()} threads, {bytes_per_ms / 1e6:.1f} GB/s read; ms for {LAYERS} layers")
    print(f"{'op':<18}{'case':<24}{'kernel':>10}{'torch':>10}{'memory':>10}")
    for row in rows:
        print(f"{row.op:<18}{row.case:<24}{row.kernel_ms:>10.3f}{row.torch_ms:>10.3f}{row.bound_ms:>10.3f}")


if __name__ == "__main__":
    main()
