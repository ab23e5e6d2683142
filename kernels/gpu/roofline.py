"""What each GPU kernel must move and compute at the least: pure functions of the shapes, in bytes and operations.

A kernel's floor on a card is the larger of bytes over memory bandwidth and operations over the rate of the unit that
does them. Each input counts once and each output once; a product and its sum are two operations.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Work:
    bytes: int
    flops: int

    def floor_us(self, gb_per_s: float, tflop_per_s: float) -> float:
        """Microseconds that no version can beat."""
        return max(self.bytes / gb_per_s / 1e3, self.flops / tflop_per_s / 1e6)


def add_rms_norm(tokens: int, n: int, itemsize: int) -> Work:
    """Reads x, residual and weight; writes the norm and the sum."""
    return Work((4 * tokens + 1) * n * itemsize, 5 * tokens * n)


def silu_and_mul(tokens: int, n: int, itemsize: int) -> Work:
    """Reads gate and up, writes n columns."""
    return Work(3 * tokens * n * itemsize, 5 * tokens * n)


def rotary_write(tokens: int, heads: int, kv_heads: int, head_dim: int, itemsize: int, kv_token_bytes: int) -> Work:
    """Reads q, k, v, cos and sin; writes q and the KV, kv_token_bytes a token (`AttentionBackend.kv_token_bytes`)."""
    read = (heads + 2 * kv_heads) * head_dim * itemsize + head_dim * 4
    return Work(
        tokens * (read + heads * head_dim * itemsize + kv_token_bytes), 6 * tokens * (heads + kv_heads) * head_dim
    )


def experts_mlp(tokens: int, experts: int, per_token: int, hidden: int, inner: int, itemsize: int) -> Work:
    """Reads x, and of `experts` that were chosen the gate, up and down matrices; writes y. The rest stays in caches."""
    matrices = 3 * hidden * inner
    return Work((2 * tokens * hidden + experts * matrices) * itemsize, 2 * tokens * per_token * matrices)


def add_lora(tokens: int, adapters: int, k: int, n: int, parts: int, rank: int, itemsize: int) -> Work:
    """Reads x, y and the matrices of each adapter; writes y."""
    matrices = adapters * rank * (parts * k + n)
    return Work((tokens * (k + 2 * n) + matrices) * itemsize, 2 * tokens * rank * (parts * k + n))


def attention(
    seq_lens: Sequence[int],
    query_lens: Sequence[int],
    heads: int,
    head_dim: int,
    itemsize: int,
    kv_token_bytes: int,
    window: int = 0,
) -> Work:
    """Reads the KV that is seen, once, and q; writes as much as q. Scores and weighted sums of what is seen alone."""
    total = seen_pairs = 0
    for length, queries in zip(seq_lens, query_lens, strict=True):
        if not queries:
            continue
        first = length - queries  # the first query's position
        oldest = max(first - window + 1, 0) if window else 0
        total += (length - oldest) * kv_token_bytes + 2 * queries * heads * head_dim * itemsize
        seen_pairs += sum(min(p + 1, window) if window else p + 1 for p in range(first, length))
    return Work(total, 4 * seen_pairs * heads * head_dim)


def sample(rows: int, vocab: int, filtered: bool) -> Work:
    """One pass over float32 logits, and two more to find a filter's threshold."""
    return Work(rows * vocab * 4 * (3 if filtered else 1), 3 * rows * vocab)
