"""How one request wants its tokens chosen; field names as in vLLM."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from engine.errors import InvalidRequestError

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: dividing logits by less overflows, and argmax is their limit."""

MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Validated once, here; the step loop trusts it.

    max_tokens: output tokens at most; None means as many as the context leaves.
    seed: None has the engine draw one. With a seed, the tokens are a function of the logits alone.
    stop: strings that end the output; found in the text, by whoever detokenises.
    stop_token_ids: token ids that end the output, beside the model's own EOS ids.
    min_tokens: no stop of any kind before this many output tokens.

    Raises `InvalidRequestError` that names the field.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0, above_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _integer("top_k", self.top_k, -1, 2**31 - 1)
        if self.top_k == -1:  # vLLM's other spelling of "all"
            object.__setattr__(self, "top_k", 0)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), MAX_SEED)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _integer("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens is {self.min_tokens}, more than max_tokens, which is {self.max_tokens}.",
                "min_tokens",
            )
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if not all(isinstance(s, str) and s for s in stops):
            raise InvalidRequestError("stop takes non-empty strings.", "stop")
        object.__setattr__(self, "stop", stops)
        ids = tuple(self.stop_token_ids)
        for token_id in ids:
            _integer("stop_token_ids", token_id, 0, 2**31 - 1)
        object.__setattr__(self, "stop_token_ids", ids)

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return tuple(self.stop)


def _number(name: str, value: object, low: float, high: float, above_low: bool = False) -> None:
    bounds = f"above {low:g} and at most {high:g}" if above_low else f"from {low:g} to {high:g}"
    allowed = f"{name} must be a number {bounds}"
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidRequestError(f"{allowed}, got {value!r}.", name)
    if value < low or value > high or (above_low and value == low):
        raise InvalidRequestError(f"{allowed}, got {value!r}.", name)


def _integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidRequestError(f"{name} must be a whole number from {low} to {high}, got {value!r}.", name)
