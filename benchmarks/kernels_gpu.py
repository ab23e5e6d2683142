"""Time of each GPU kernel beside its floor (`kernels.gpu.roofline`), on a card: `python -m benchmarks.kernels_gpu`.

Shapes are Qwen3-0.6B's: hidden 1024, 16 query and 8 KV heads of 128, MLP 3072, vocabulary 151936; experts are
Qwen3-30B-A3B's, 128 of 768 over 2048, 8 a token. The two ceilings, memory bandwidth and 16-bit matrix rate, are
measured first. A time is the median of several, each of many launches between two events, in a captured graph where
that works, and over as many sets of inputs as exceed the cache.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from kernels.attention import AttentionBackend, AttentionMetadata, HeadNorms
from kernels.attention.backend import FP8
from kernels.attention.select import installed, select_gpu_backend
from kernels.attention.triton_backend import TritonBackend
from kernels.gpu import describe, roofline
from kernels.gpu.roofline import Work

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCAB = 1024, 16, 8, 128, 3072, 151_936
CACHE_BYTES = 256 << 20  # more than any card's L2
OLD_CARD = torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0)
DTYPE = torch.float16 if OLD_CARD else torch.bfloat16


@dataclass
class Row:
    """share: floor_us / us, of what the card can do at best."""

    name: str
    shape: str
    us: float
    bytes: int
    flops: int
    floor_us: float
    share: float


@dataclass
class Case:
    """make: one set of inputs -> a launch on it."""

    name: str
    shape: str
    work: Work
    make: Callable[[], Callable[[], object]]


def timed_us(launches: list[Callable[[], object]], repeats: int = 7) -> float:
    """Median microseconds of one launch, launches taken in turn. Replays of a graph leave the host's time out."""
    for launch in launches[:2]:
        launch()
    torch.cuda.synchronize()
    run: Callable[[], None] = partial(_each, launches)
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        run = graph.replay
    except RuntimeError:  # a launch that waits for the host cannot be captured
        torch.cuda.synchronize()
    run()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)) * 1e3 / len(launches))
    return statistics.median(times)


def _each(launches: list[Callable[[], object]]) -> None:
    for launch in launches:
        launch()


def ceilings() -> tuple[float, float]:
    """(GB/s of a large copy, reads plus writes; TFLOP/s of a large product in DTYPE)."""
    source = torch.randint(0, 255, (1 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    bandwidth = 2 * source.nbytes / timed_us([partial(target.copy_, source)] * 4) / 1e3
    a, b = torch.randn(2, 8192, 8192, dtype=DTYPE, device="cuda")
    rate = 2 * 8192**3 / timed_us([partial(torch.mm, a, b)] * 4) / 1e6
    return bandwidth, rate


def cases() -> Iterator[Case]:
    from kernels import activation, rms_norm, sampler

    def norm(tokens: int) -> Callable[[], object]:
        x, residual = _random(tokens, HIDDEN), _random(tokens, HIDDEN)
        return partial(rms_norm.add_rms_norm, x, residual, _random(HIDDEN), 1e-6)

    def swiglu(tokens: int) -> Callable[[], object]:
        return partial(activation.silu_and_mul, _random(tokens, 2 * MLP))

    for tokens in (1, 256, 8192):
        yield Case(
            "add_rms_norm",
            f"{tokens} x {HIDDEN}",
            roofline.add_rms_norm(tokens, HIDDEN, 2),
            partial(norm, tokens),
        )
        yield Case(
            "silu_and_mul",
            f"{tokens} x {MLP}",
            roofline.silu_and_mul(tokens, MLP, 2),
            partial(swiglu, tokens),
        )
        for kv_dtype in (None, FP8):
            backend = _triton(kv_dtype)
            yield Case(
                f"norm_rotary_write{_suffix(kv_dtype)}",
                f"{tokens} tokens",
                roofline.rotary_write(
                    tokens, HEADS, KV_HEADS, HEAD_DIM, 2, backend.kv_token_bytes(KV_HEADS, HEAD_DIM, DTYPE)
                ),
                partial(_rotary_write, backend, tokens),
            )
    for kv_dtype in (None, FP8, torch.int8):
        for sequences, queries, length in ((1, 1, 800), (1, 1, 32_768), (256, 1, 800), (4, 2048, 2048)):
            yield _attention(_triton(kv_dtype), sequences, queries, length)
    gpu = describe(torch.device("cuda"))
    if gpu.capability >= (8, 0):
        for tokens in (1, 64, 8192):
            yield _experts(tokens)
    for tokens in (16, 8192):
        yield _adapters(tokens)
    for block_size in (0, 256):
        other = select_gpu_backend(gpu, installed(), DTYPE, HEAD_DIM, block_size)
        if other.name.startswith("flash"):
            for sequences, queries, length in ((256, 1, 800), (4, 2048, 2048)):
                yield _attention(other, sequences, queries, length)
    for rows in (1, 256):
        for filtered in (False, True):
            yield Case(
                "sample filtered" if filtered else "sample",
                f"{rows} x {VOCAB}",
                roofline.sample(rows, VOCAB, filtered),
                partial(_sampling, sampler.choose, rows, filtered),
            )


def _adapters(tokens: int, adapters: int = 2, rank: int = 16) -> Case:
    from kernels import lora

    def make() -> Callable[[], object]:
        weights = lora.lora_weights(adapters, rank, HIDDEN, (MLP, MLP), dtype=DTYPE, device=torch.device("cuda"))
        arrays = lora.lora_tiles(np.arange(tokens, dtype=np.int32) % adapters)
        grouped = lora.LoraTokens(*(torch.from_numpy(array).cuda() for array in arrays))
        return partial(lora.add_lora, _random(tokens, 2 * MLP), _random(tokens, HIDDEN), weights, grouped)

    work = roofline.add_lora(tokens, adapters, HIDDEN, 2 * MLP, 2, rank, 2)
    return Case("add_lora", f"{tokens} tokens of {adapters} adapters of rank {rank}", work, make)


def _experts(tokens: int, count: int = 128, per_token: int = 8, hidden: int = 2048, inner: int = 768) -> Case:
    from kernels import experts

    def make() -> Callable[[], object]:
        scores, chosen = torch.rand(tokens, count, device="cuda").topk(per_token)
        gate_up, down = _random(count, 2 * inner, hidden), _random(count, hidden, inner)
        return partial(experts.experts_mlp, _random(tokens, hidden), gate_up, down, chosen, scores.to(DTYPE), False)

    touched = count * (1 - (1 - per_token / count) ** tokens)  # by tokens that choose at random
    work = roofline.experts_mlp(tokens, round(touched), per_token, hidden, inner, 2)
    return Case("experts_mlp", f"{tokens} x {per_token} of {count}", work, make)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=DTYPE, device="cuda")


def _triton(kv_dtype: torch.dtype | None) -> AttentionBackend:
    return TritonBackend(kv_dtype=kv_dtype, gpu=describe(torch.device("cuda")))


def _suffix(kv_dtype: torch.dtype | None) -> str:
    return "" if kv_dtype is None else f" {str(kv_dtype).removeprefix('torch.')}"


def _rotary_write(backend: AttentionBackend, tokens: int) -> Callable[[], object]:
    q, k, v = _random(tokens, HEADS + 2 * KV_HEADS, HEAD_DIM).split((HEADS, KV_HEADS, KV_HEADS), dim=1)
    caches = backend.kv_cache(-(-tokens // 16) + 1, 16, KV_HEADS, HEAD_DIM, DTYPE, "cuda")
    table = torch.rand(tokens + 1, HEAD_DIM // 2, device="cuda")
    ids = torch.randperm(tokens, device="cuda")
    norms = HeadNorms(_random(HEAD_DIM), _random(HEAD_DIM), 1e-6)
    return partial(backend.norm_rotary_write, q, k, v, norms, table, table, ids, *caches, ids)


def _attention(backend: AttentionBackend, sequences: int, queries: int, length: int) -> Case:
    token_bytes = backend.kv_token_bytes(KV_HEADS, HEAD_DIM, DTYPE)
    work = roofline.attention([length] * sequences, [queries] * sequences, HEADS, HEAD_DIM, 2, token_bytes)

    def make() -> Callable[[], object]:
        block_size = backend.default_block_size
        blocks = -(-length // block_size)
        k_cache, v_cache = backend.kv_cache(sequences * blocks, block_size, KV_HEADS, HEAD_DIM, DTYPE, "cuda")
        for start in range(0, sequences * blocks * block_size, 65_536):
            slots = torch.arange(start, min(start + 65_536, sequences * blocks * block_size), device="cuda")
            k, v = _random(2, len(slots), KV_HEADS, HEAD_DIM)
            backend.write(k, v, k_cache, v_cache, slots)
        metadata = AttentionMetadata(
            query_start=torch.arange(sequences + 1, dtype=torch.int32, device="cuda") * queries,
            seq_lens=torch.full((sequences,), length, dtype=torch.int32, device="cuda"),
            block_tables=torch.randperm(sequences * blocks, device="cuda").int().view(sequences, blocks),
            rows=torch.arange(sequences, dtype=torch.int32, device="cuda"),
            slots=torch.full((sequences * queries,), -1, device="cuda"),
            max_query_len=queries,
            max_seq_len=length,
        )
        q = _random(sequences * queries, HEADS, HEAD_DIM)
        return partial(backend.attend, q, k_cache, v_cache, metadata, HEAD_DIM**-0.5)

    kind = "decode" if queries == 1 else "prompt"
    name = f"{backend.name} {kind}{_suffix(backend.kv_dtype)}"
    return Case(name, f"{sequences} x {queries} of {length}", work, make)


def _sampling(choose: Callable[..., object], rows: int, filtered: bool) -> Callable[[], object]:
    logits = torch.randn(rows, VOCAB, device="cuda") * 3
    ids = torch.arange(rows, device="cuda")
    ones = torch.ones(rows, device="cuda")
    filters = (torch.full_like(ids, 50, dtype=torch.int32), ones * 0.9, ones * 0.0) if filtered else None
    return partial(choose, logits, ids, ones, ids, ids, filters)


def rows(budget_s: float) -> Iterator[dict[str, Any]]:
    """Rows, as many as the budget allows; the first are the ceilings. Needs a card.

    A case that fails has an error in place of its times, and the others go on.
    """
    deadline = time.monotonic() + budget_s
    bandwidth, rate = ceilings()
    yield {"name": "ceiling", "shape": "copy", "gb_per_s": bandwidth}
    yield {"name": "ceiling", "shape": f"{str(DTYPE).removeprefix('torch.')} product of 8192", "tflop_per_s": rate}
    for case in cases():
        if time.monotonic() > deadline:
            break
        try:
            us = _time_case(case)
        except Exception as error:
            yield {"name": case.name, "shape": case.shape, "error": f"{type(error).__name__}: {error}"[:300]}
            continue
        floor = case.work.floor_us(bandwidth, rate)
        yield asdict(Row(case.name, case.shape, us, case.work.bytes, case.work.flops, floor, floor / us))


def _time_case(case: Case) -> float:
    sets = max(1, min(64, -(-CACHE_BYTES // max(case.work.bytes, 1))))
    launches = [case.make() for _ in range(sets)]
    return timed_us(launches * max(1, 16 // sets))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    parser.add_argument("--budget", type=float, default=120.0, help="seconds")
    for found in rows(parser.parse_args().budget):
        print(json.dumps(found), flush=True)
