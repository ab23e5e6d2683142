"""What /v1/chat/completions and /v1/completions both take: how tokens are chosen, where they end, what comes back."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, field_validator, model_validator

from app.openai.model import RequestModel
from app.openai.structured import StructuredFields
from engine.sampling_params import (
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_N,
    MAX_SEED,
    SamplingParams,
)

MAX_STOPS = 128
"""Stop strings of a request: each of them is looked for at every token."""

MAX_STOP_TOKEN_IDS = 1024

MAX_ALLOWED_TOKEN_IDS = 2**20

MAX_STOP_LENGTH = 10_000
MAX_BAD_WORD_LENGTH = 1_000
MAX_SALT_LENGTH = 1_000
"""Characters of each."""

MAX_TOKENS = 2**31 - 1

_SAMPLING_FIELDS = (
    "n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p",
    "seed", "min_tokens", "prompt_logprobs", "logit_bias", "allowed_token_ids", "stop", "stop_token_ids", "bad_words",
    "ignore_eos", "include_stop_str_in_output", "skip_special_tokens",
)  # fmt: skip


def _listed(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


def _biases(given: Any) -> Any:
    """JSON has only strings as keys."""
    if not isinstance(given, dict):
        return given
    if len(given) > MAX_LOGIT_BIASES:
        raise ValueError(f"has {len(given)} entries; at most {MAX_LOGIT_BIASES} are allowed")
    biases = {}
    for key, bias in given.items():
        if not (isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10):
            raise ValueError(f"{str(key)[:40]!r} is no token id")
        biases[int(key)] = bias
    return biases


# fail_fast, here and below: an error object for each bad item of a large list would take gigabytes.
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
BadWord = Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_LENGTH)]
_STOP = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}
Stops = Annotated[
    list[Stop],
    Field(max_length=MAX_STOPS, fail_fast=True),
    BeforeValidator(_listed),
    WithJsonSchema({"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOPS}]}),
]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
StopTokenIds = Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)]
AllowedTokenIds = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS, fail_fast=True)]
BadWords = Annotated[list[BadWord], Field(max_length=MAX_BAD_WORDS, fail_fast=True)]
LogitBias = Annotated[
    dict[TokenId, float],
    BeforeValidator(_biases),
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,10}$"},
            "additionalProperties": {"type": "number"},
            "maxProperties": MAX_LOGIT_BIASES,
        }
    ),
]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenCount = Annotated[int, Field(ge=0, le=MAX_TOKENS)]


class StreamOptions(RequestModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None

    @field_validator("continuous_usage_stats")
    @classmethod
    def _not_there(cls, given: bool | None) -> bool | None:
        if given:
            raise ValueError("is not supported by this server: usage comes once, at the end, with include_usage")
        return given


class GenerationRequest(StructuredFields):
    """None is "not given", as OpenAI's own clients send it. Ranges are those of `SamplingParams`."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    max_tokens: TokenCount | None = None
    min_tokens: TokenCount | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=MAX_SEED)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    logit_bias: LogitBias | None = None
    allowed_token_ids: AllowedTokenIds | None = None
    bad_words: BadWords | None = None
    stop: Stops | None = None
    stop_token_ids: StopTokenIds | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    return_token_ids: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_LENGTH)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None

    @model_validator(mode="after")
    def _only_in_streams(self) -> "GenerationRequest":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is for streams: set stream to true or leave it out")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs does not come in streams: set stream to false or leave it out")
        return self

    @property
    def is_batch(self) -> bool:
        """OpenAI's "flex" is slower and cheaper: here it runs where nobody else wants to."""
        return self.service_tier == "flex"

    @property
    def urgency(self) -> int:
        """`priority`, lower is earlier; the tier of that name is one level."""
        return (self.priority or 0) - (self.service_tier == "priority")

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def _params(self, drawn_seed: int | None, defaults: Mapping[str, Any] | None, **more: Any) -> SamplingParams:
        """defaults: the model's, for fields that are not given.

        Raises `InvalidRequestError` that names the field that is out of range.
        """
        given: dict[str, Any] = {"seed": drawn_seed} if defaults is None else {**defaults, "seed": drawn_seed}
        for name in _SAMPLING_FIELDS:
            if (value := getattr(self, name)) is not None:
                given[name] = value
        if not self.logit_bias:
            given["logit_bias"] = None
        return SamplingParams(**(given | more))
