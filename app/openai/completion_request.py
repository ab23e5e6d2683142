"""The body of /v1/completions."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, PlainValidator, WithJsonSchema, model_validator

from app.openai.sampling import GenerationRequest
from engine.sampling_params import MAX_LOGPROBS, MAX_N, SamplingParams

DEFAULT_COMPLETION_TOKENS = 16
"""What /v1/completions makes when max_tokens is not given; a chat goes on to its end or the context's."""

MAX_PROMPTS = 2048
"""Prompts in one completions request, OpenAI's limit; and outputs for them, which n multiplies."""


def _prompts(prompt: Any) -> list[str] | list[list[int]]:
    """The four shapes that OpenAI takes as a list of prompts."""
    prompts: list[Any] = [prompt] if isinstance(prompt, str) or _is_ids(prompt) else prompt
    if not isinstance(prompts, list) or not prompts:
        raise ValueError(
            "give a string, a list of strings, a list of token ids, or a list of such lists; not an empty one"
        )
    if len(prompts) > MAX_PROMPTS:
        raise ValueError(f"at most {MAX_PROMPTS} prompts in one request, not {len(prompts)}")
    if not (all(isinstance(item, str) for item in prompts) or all(_is_ids(item) for item in prompts)):
        raise ValueError("prompts must be all strings or all lists of token ids (whole numbers, at least one)")
    return prompts


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


_IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_PROMPTS},
        _IDS,
        {"type": "array", "items": _IDS, "minItems": 1, "maxItems": MAX_PROMPTS},
    ]
}

Prompts = Annotated[list[str] | list[list[int]], PlainValidator(_prompts), WithJsonSchema(_PROMPT_SCHEMA)]


class CompletionRequest(GenerationRequest):
    prompt: Prompts
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_N)] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> "CompletionRequest":
        if not self.generates and self.min_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens}, more than max_tokens, which is 0")
        if self.best_of is not None:
            if self.best_of < (self.n or 1):
                raise ValueError(f"best_of is {self.best_of}, less than n, which is {self.n or 1}")
            if self.stream and self.best_of > (self.n or 1):
                raise ValueError("best_of compares whole outputs, so it cannot be streamed: set stream to false")
        if len(self.prompt) * self.outputs_made > MAX_PROMPTS:
            raise ValueError(
                f"at most {MAX_PROMPTS} outputs in one request, not {len(self.prompt)} x {self.outputs_made}"
            )
        return self

    @property
    def generates(self) -> bool:
        """False for max_tokens 0, the call that only reads the prompt."""
        return self.max_tokens != 0

    @property
    def outputs_made(self) -> int:
        """For each prompt; n of them, the best, are answered."""
        return self.best_of or self.n or 1

    @property
    def scores_prompt(self) -> bool:
        return self.prompt_logprobs is not None or (bool(self.echo) and self.logprobs is not None)

    def sampling_params(
        self, drawn_seed: int | None = None, defaults: Mapping[str, Any] | None = None
    ) -> SamplingParams:
        """drawn_seed: for a request that gives none; defaults: the model's. Raises `InvalidRequestError`."""
        limit = DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        if limit == 0 and not self.scores_prompt:
            limit = 1  # nothing will run; the rest is still checked
        logprobs = self.logprobs
        if logprobs is None and self.outputs_made > (self.n or 1):
            logprobs = 0  # to know the best
        scores: dict[str, Any] = {}
        if self.echo and self.logprobs is not None:
            scores["prompt_logprobs"] = max(self.logprobs, self.prompt_logprobs or 0)
        return self._params(drawn_seed, defaults, max_tokens=limit, logprobs=logprobs, n=self.outputs_made, **scores)
