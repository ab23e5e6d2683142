"""What 8 bits cost in quality, against float32, teacher-forced: `python -m benchmarks.quality [--model M]`.

Text that every Python brings along, its licence and its language reference, is cut into windows; at each position the
quantised model's distribution is compared with that of the same weights in float32. Printed for each variant:

perplexity ratio: quantised over float32.
argmax agreement: positions where both choose one token; then only those where float32's margin, between its two
    highest logits, exceeds 1.
KL: mean divergence of the quantised distribution from float32's, in nats.

Exit status 1 if int8 with a float32 KV cache misses a gate: see `GATES`.
"""

import argparse
import json
import math
import sysconfig
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor

from engine.config import DEFAULT_MODEL
from engine.hub import resolve_model
from engine.layers.attention import KVCache
from engine.layers.linear import Quantization
from engine.loader import load_weights
from engine.model_config import load_model_config
from engine.models.decoder import Decoder
from engine.text.tokenizer import load_tokenizer
from kernels.attention import AttentionMetadata, select_backend

WINDOW = 512


@dataclass
class Quality:
    """Of one variant; shares are from 0 to 1."""

    variant: str
    tokens: int
    perplexity: float
    perplexity_ratio: float
    argmax_agreement: float
    confident_agreement: float
    kl: float

    def misses(self) -> list[str]:
        """The gates that it misses."""
        return [
            f"{name} {getattr(self, name):.5f}, allowed {'at most' if upper else 'at least'} {limit}"
            for name, (upper, limit) in GATES.items()
            if (getattr(self, name) > limit if upper else getattr(self, name) < limit)
        ]


GATES = {
    "perplexity_ratio": (True, 1.005),
    "argmax_agreement": (False, 0.935),
    "confident_agreement": (False, 0.999),
    "kl": (True, 0.01),
}
"""Measure -> (whether the limit is an upper one, the limit)."""


def text_windows(encode: Callable[[str], list[int]], windows: int) -> Tensor:
    """In turn of Python's licence, while it lasts (some 3,800 tokens), and of its language reference.

    -> int64 [windows, WINDOW]
    """
    licence = Path(sysconfig.get_path("stdlib")) / "LICENSE.txt"
    reference = "\n\n".join(topics.values())
    texts = [licence.read_text(encoding="utf-8"), reference] if licence.exists() else [reference]
    sources = [encode(text) for text in texts]
    cuts = [source[i : i + WINDOW] for i in range(0, max(map(len, sources)), WINDOW) for source in sources]
    whole = [cut for cut in cuts if len(cut) == WINDOW][:windows]
    if len(whole) < windows:
        raise SystemExit(f"the text has {len(whole)} windows of {WINDOW} tokens; ask for at most that many")
    return torch.tensor(whole)


def load(path: Path, quantization: Quantization | None, kv_dtype: torch.dtype | None) -> tuple[Decoder, list[KVCache]]:
    config = load_model_config(path)
    backend = select_backend("cpu", torch.float32, config.head_dim, kv_dtype=kv_dtype)
    device = torch.device("cpu")
    model = Decoder(
        config, backend, max_positions=WINDOW, dtype=torch.float32, device=device, quantization=quantization
    )
    load_weights(model.targets(), path, config)
    size = backend.default_block_size
    blocks = -(-WINDOW // size)
    caches = [
        backend.kv_cache(blocks, size, config.num_kv_heads, config.head_dim, torch.float32, device)
        for _ in range(config.num_layers)
    ]
    return model, caches


@torch.inference_mode()
def logits_of(model: Decoder, caches: list[KVCache], window: Tensor) -> Tensor:
    """window: [n] -> logits of each position [n, vocab]."""
    n = len(window)
    positions = torch.arange(n)
    blocks = caches[0][0].shape[0]
    metadata = AttentionMetadata(
        query_start=torch.tensor([0, n], dtype=torch.int32),
        seq_lens=torch.tensor([n], dtype=torch.int32),
        block_tables=torch.arange(blocks, dtype=torch.int32)[None],
        rows=torch.zeros(1, dtype=torch.int32),
        slots=positions,
        max_query_len=n,
        max_seq_len=n,
    )
    return model.logits(model.forward(window, positions, caches, metadata))


@dataclass
class Tally:
    """Sums over positions."""

    tokens: int = 0
    nll: float = 0.0
    exact_nll: float = 0.0
    agreed: int = 0
    confident: int = 0
    confident_agreed: int = 0
    kl: float = 0.0

    def add(self, exact: Tensor, got: Tensor, following: Tensor) -> None:
        """exact, got: logits [n, vocab]; following: the text's next tokens [n - 1]."""
        exact, got = exact.log_softmax(-1), got.log_softmax(-1)
        top = exact.topk(2).values
        same = exact.argmax(-1) == got.argmax(-1)
        confident = top[:, 0] - top[:, 1] > 1.0
        self.tokens += len(exact)
        self.agreed += int(same.sum())
        self.confident += int(confident.sum())
        self.confident_agreed += int((same & confident).sum())
        self.kl += float((exact.exp() * (exact - got)).sum(-1).double().sum())
        self.exact_nll -= float(exact[:-1].gather(1, following[:, None]).double().sum())
        self.nll -= float(got[:-1].gather(1, following[:, None]).double().sum())

    def quality(self, variant: str, windows: int) -> Quality:
        scored = self.tokens - windows  # the last position of a window has no next token
        return Quality(
            variant=variant,
            tokens=self.tokens,
            perplexity=math.exp(self.nll / scored),
            perplexity_ratio=math.exp((self.nll - self.exact_nll) / scored),
            argmax_agreement=self.agreed / self.tokens,
            confident_agreement=self.confident_agreed / max(self.confident, 1),
            kl=self.kl / self.tokens,
        )


VARIANTS: dict[str, tuple[Quantization | None, torch.dtype | None]] = {
    "float32, bfloat16 KV": (None, torch.bfloat16),
    "float32, int8 KV": (None, torch.int8),
    "int8": ("int8", None),
    "int8, bfloat16 KV": ("int8", torch.bfloat16),
    "int8, int8 KV": ("int8", torch.int8),
}
GATED = "int8"


def measure(path: Path, windows: Tensor) -> list[Quality]:
    exact = load(path, None, None)
    results = []
    for variant, setting in VARIANTS.items():
        model = load(path, *setting)
        tally = Tally()
        for window in windows:
            tally.add(logits_of(*exact, window), logits_of(*model, window), window[1:])
        results.append(tally.quality(variant, len(windows)))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--tokens", type=int, default=4096, help=f"rounded up to windows of {WINDOW}")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    args = parser.parse_args()
    path = resolve_model(args.model)
    windows = text_windows(load_tokenizer(path).encode, -(-args.tokens // WINDOW))
    results = measure(path, windows)
    if args.json:
        print(json.dumps({"model": path.name, "rows": [asdict(row) for row in results]}))
    else:
        print(f"{path.name}, {windows.numel()} tokens in windows of {WINDOW}, against float32")
        print(f"{'variant':<24}{'ppl':>9}{'ppl ratio':>11}{'argmax':>9}{'margin > 1':>12}{'KL':>9}")
        for row in results:
            print(
                f"{row.variant:<24}{row.perplexity:>9.3f}{row.perplexity_ratio:>11.4f}{row.argmax_agreement:>9.2%}"
                f"{row.confident_agreement:>12.3%}{row.kl:>9.5f}"
            )
    misses = [miss for row in results if row.variant == GATED for miss in row.misses()]
    if misses:
        raise SystemExit(f"{GATED} misses its gate: {'; '.join(misses)}")


if __name__ == "__main__":
    main()
