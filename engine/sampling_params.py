"""How one request wants its tokens chosen; field names as in vLLM."""

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from engine.errors import InvalidRequestError
from engine.structured.spec import StructuredOutputSpec

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: dividing logits by less overflows, and argmax is their limit."""

MAX_SEED = 2**63 - 1

MAX_N = 128

MAX_LOGPROBS = 20
"""Most likely tokens that may be asked for beside the chosen one; OpenAI's limit."""

MAX_LOGIT_BIASES = 1024

MAX_LOGIT_BIAS = 100.0
"""Biases beyond this are taken as this, as OpenAI documents."""

MAX_BAD_WORDS = 1024

MAX_BAD_WORD_TOKENS = 128


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Validated once, here; the step loop trusts it.

    n: outputs for the prompt. The engine takes single sequences: `children` makes n of one.
    presence_penalty, frequency_penalty: taken off the logit of a token that is in the output, once, and once for each
        time it is there.
    repetition_penalty: divides the logit of a token that is in the prompt or the output if it is positive, and
        multiplies it otherwise (Keskar et al., "CTRL", 2019).
    logit_bias: added to the logits of these token ids; clamped to [-100, 100].
    allowed_token_ids: no other token is chosen; None allows all.
    bad_words: texts that the output may not have; `engine.bad_words.expand` turns them into bad_words_token_ids.
    bad_words_token_ids: a sequence's last token is not chosen where the output ends with the ones before it.
    seed: None has the engine draw one. With a seed, the tokens are a function of the logits alone.
    max_tokens: output tokens at most; None means as many as the context leaves. 0 scores the prompt and makes no token;
        it needs prompt_logprobs.
    min_tokens: no stop of any kind before this many output tokens.
    logprobs: log probabilities of each output token and of this many most likely ones, by the model itself: before
        biases, penalties, temperature and filters.
    prompt_logprobs: the same of each prompt token but the first. The prompt is computed whole for it, without the
        prefix cache.
    structured_outputs: the form that the output must have. It ends when nothing more can follow, whatever min_tokens
        says.
    stop: strings that end the output; found in the text, by whoever detokenises.
    stop_token_ids: token ids that end the output, beside the model's own EOS ids.

    Raises `InvalidRequestError` that names the field.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    bad_words: Sequence[str] = ()
    bad_words_token_ids: Sequence[Sequence[int]] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputSpec | None = None

    def __post_init__(self) -> None:
        _integer("n", self.n, 1, MAX_N)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 2.0, above_low=True)
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0, above_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _integer("top_k", self.top_k, -1, 2**31 - 1)
        if self.top_k == -1:  # vLLM's other spelling of "all"
            object.__setattr__(self, "top_k", 0)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), MAX_SEED)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, MAX_LOGPROBS)
        if not isinstance(self.structured_outputs, StructuredOutputSpec | None):
            raise InvalidRequestError(
                f"structured_outputs must be a StructuredOutputSpec, got {type(self.structured_outputs).__name__}.",
                "structured_outputs",
            )
        self._check_lengths()
        stops = (self.stop,) if isinstance(self.stop, str) else self._texts("stop", self.stop)
        if not all(stops):
            raise InvalidRequestError("stop takes non-empty strings.", "stop")
        object.__setattr__(self, "stop", stops)
        object.__setattr__(self, "stop_token_ids", self._ids("stop_token_ids", self.stop_token_ids))
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", self._biases(self.logit_bias))
        if self.allowed_token_ids is not None:
            allowed = tuple(dict.fromkeys(self._ids("allowed_token_ids", self.allowed_token_ids)))
            if not allowed:
                raise InvalidRequestError(
                    "allowed_token_ids is empty, so no token could be chosen: name at least one, or leave it out.",
                    "allowed_token_ids",
                )
            object.__setattr__(self, "allowed_token_ids", allowed)
        self._check_bad_words()

    def _check_lengths(self) -> None:
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 0, 2**31 - 1)
        _integer("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise InvalidRequestError(
                "max_tokens must be at least 1, got 0; 0 is only for prompt_logprobs, which scores the prompt.",
                "max_tokens",
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens is {self.min_tokens}, more than max_tokens, which is {self.max_tokens}.",
                "min_tokens",
            )

    def _check_bad_words(self) -> None:
        words = self._texts("bad_words", self.bad_words)
        if not all(word.strip() for word in words):
            raise InvalidRequestError("bad_words takes strings with more than white space in them.", "bad_words")
        sequences = tuple(self._ids("bad_words_token_ids", ids) for ids in self.bad_words_token_ids)
        if not all(0 < len(ids) <= MAX_BAD_WORD_TOKENS for ids in sequences):
            raise InvalidRequestError(
                f"bad_words_token_ids takes non-empty lists of at most {MAX_BAD_WORD_TOKENS} ids each.",
                "bad_words_token_ids",
            )
        if max(len(words), len(sequences) // 2) > MAX_BAD_WORDS:  # a text has two forms, with and without a space
            raise InvalidRequestError(f"bad_words has more than {MAX_BAD_WORDS} entries.", "bad_words")
        object.__setattr__(self, "bad_words", words)
        object.__setattr__(self, "bad_words_token_ids", sequences)

    @staticmethod
    def _texts(name: str, given: object) -> tuple[str, ...]:
        if isinstance(given, str) or not isinstance(given, Sequence) or not all(isinstance(s, str) for s in given):
            raise InvalidRequestError(f"{name} must be a list of strings, got {given!r:.100}.", name)
        return tuple(given)

    @staticmethod
    def _ids(name: str, given: object) -> tuple[int, ...]:
        if isinstance(given, str | bytes) or not isinstance(given, Sequence):
            raise InvalidRequestError(f"{name} must be a list of token ids, got {given!r:.100}.", name)
        for token_id in given:
            _integer(name, token_id, 0, 2**31 - 1)
        return tuple(given)

    @staticmethod
    def _biases(given: Mapping[int, float]) -> dict[int, float]:
        if not isinstance(given, Mapping):
            raise InvalidRequestError(f"logit_bias must map token ids to numbers, got {given!r:.100}.", "logit_bias")
        if len(given) > MAX_LOGIT_BIASES:
            raise InvalidRequestError(
                f"logit_bias has {len(given)} entries; at most {MAX_LOGIT_BIASES} are allowed.", "logit_bias"
            )
        for token_id, bias in given.items():
            _integer("logit_bias", token_id, 0, 2**31 - 1)
            if isinstance(bias, bool) or not isinstance(bias, int | float) or not math.isfinite(bias):
                raise InvalidRequestError(
                    f"logit_bias: {bias!r} for token {token_id} is no finite number.", "logit_bias"
                )
        return {i: min(max(float(bias), -MAX_LOGIT_BIAS), MAX_LOGIT_BIAS) for i, bias in given.items()}

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return tuple(self.stop)

    @property
    def penalised(self) -> bool:
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    @property
    def scores_only(self) -> bool:
        """Whether the prompt is scored and no token made."""
        return self.max_tokens == 0


def children(params: SamplingParams) -> list[SamplingParams]:
    """The n single sequences that `params` asks for: child i has seed + i, wrapped to 64 bits, from a seed that is
    drawn if there is none. The first is what n = 1 gives, and it alone scores the prompt, so that the others can take
    the prompt's KV from it; with max_tokens 0 all score.
    """
    if params.n == 1:
        return [params]
    seed = secrets.randbits(63) if params.seed is None else params.seed
    return [
        replace(
            params,
            n=1,
            seed=(seed + i + 2**63) % 2**64 - 2**63,
            prompt_logprobs=params.prompt_logprobs if i == 0 or params.scores_only else None,
        )
        for i in range(params.n)
    ]


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
