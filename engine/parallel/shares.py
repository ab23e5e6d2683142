"""Which rows and columns of a model's matrices each rank of tensor parallelism holds (after Shoeybi et al., 2019).

Attention is shared by heads and an MLP by its inner features: what reads the hidden state is cut by rows, what makes it
by columns, so that two sums over all ranks are the whole traffic of a layer. Embedding and head are cut by tokens.
"""

from dataclasses import dataclass

from engine.errors import ConfigError
from engine.model_config import ModelConfig
from engine.parallel.group import ParallelGroup
from engine.parallel.heads import heads_problem
from kernels.quantized_weight import GROUP


@dataclass(frozen=True, slots=True)
class Span:
    """`size` of `whole` rows or columns, from `start` on. What lies beyond the whole is padding: zeros."""

    start: int
    size: int
    whole: int

    @classmethod
    def of(cls, given: "int | Span") -> "Span":
        """A number stands for all of that many."""
        return given if isinstance(given, Span) else cls(0, given, given)

    @classmethod
    def share(cls, whole: int, rank: int, size: int) -> "Span":
        """Of rank among size, which are as even as can be."""
        start = whole * rank // size
        return cls(start, whole * (rank + 1) // size - start, whole)

    @property
    def slice(self) -> slice:
        return slice(self.start, self.start + self.size)

    @property
    def is_all(self) -> bool:
        return self.size == self.whole

    def times(self, width: int) -> "Span":
        """Where each of them is `width` wide."""
        return Span(self.start * width, self.size * width, self.whole * width)


@dataclass(frozen=True, slots=True)
class Shares:
    """What one rank holds. group: None where there is one rank, which holds all.

    heads, kv_heads: of attention; where ranks outnumber KV heads, several hold the same one.
    inner, expert_inner: features between the projections of an MLP, and of each expert.
    vocabulary: tokens of embedding and head; the same number on all ranks, the last padded.
    """

    group: ParallelGroup | None
    heads: Span
    kv_heads: Span
    inner: Span
    expert_inner: Span
    vocabulary: Span


def share(config: ModelConfig, group: ParallelGroup | None = None, *, quantized: bool = False) -> Shares:
    """What the rank of `group` holds. quantized: weights have scales for each GROUP of columns.

    Raises `ConfigError` with the numbers, and with the sizes that would do, where the model cannot be cut so.
    """
    rank, size = (0, 1) if group is None else (group.rank, group.size)
    if problem := _problem(config, size, quantized):
        most = min(config.num_heads, 64)
        sizes = ", ".join(str(n) for n in range(1, most + 1) if _problem(config, n, quantized) is None)
        raise ConfigError(f"tensor_parallel_size is {size}, but {problem}; with this model it may be {sizes}")
    kv_size, copies = (size, 1) if config.num_kv_heads >= size else (config.num_kv_heads, size // config.num_kv_heads)
    tokens = -(-config.vocab_size // size)
    return Shares(
        group=group,
        heads=Span.share(config.num_heads, rank, size),
        kv_heads=Span.share(config.num_kv_heads, rank // copies, kv_size),
        inner=_features(config.intermediate_size, rank, size),
        expert_inner=_features(_expert_size(config), rank, size),
        vocabulary=Span(rank * tokens, tokens, config.vocab_size),
    )


def _problem(config: ModelConfig, size: int, quantized: bool) -> str | None:
    if problem := heads_problem(config, size):
        return problem
    heads = config.num_heads
    if quantized and heads // size * config.head_dim % GROUP and size > 1:
        return (
            f"{heads // size} heads of {config.head_dim} are {heads // size * config.head_dim} columns of o_proj to a "
            f"rank, which must be a multiple of {GROUP} for weights in groups of that many"
        )
    dense = any(not layer.sparse for layer in config.layers)
    for name, inner, used in (
        ("intermediate size", config.intermediate_size, dense),
        ("experts' intermediate size", _expert_size(config), config.experts is not None),
    ):
        if not used or (inner % GROUP == 0 and inner // GROUP >= size):
            continue
        if quantized and size > 1:
            return (
                f"the {name} is {inner}, which {size} ranks cannot share in groups of {GROUP}, as weights in 8 bits "
                "have them"
            )
        if inner % size:
            return f"the {name} is {inner}, which cannot be shared evenly by {size} ranks"
    return None


def _expert_size(config: ModelConfig) -> int:
    return 0 if config.experts is None else config.experts.intermediate_size


def _features(inner: int, rank: int, size: int) -> Span:
    """In whole groups of columns where there are enough, evenly or not; so the codes of a quantised weight stay."""
    if inner % GROUP == 0 and inner // GROUP >= size:
        return Span.share(inner // GROUP, rank, size).times(GROUP)
    return Span.share(inner, rank, size)
