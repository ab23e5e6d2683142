"""What a request may ask of an engine: what is refused before it waits, and where what runs ends by itself."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from engine.errors import ContextLengthError, InvalidRequestError
from engine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class RequestRules:
    """max_total_tokens: prompt plus output of one request. has_grammars: whether an output may be held to a form."""

    max_total_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    has_grammars: bool

    def check(self, prompt_ids: Sequence[int], params: SamplingParams, output_ids: Sequence[int] = ()) -> None:
        """Raise `InvalidRequestError` or `ContextLengthError` for a request that could never run."""
        if params.n != 1:
            raise InvalidRequestError(
                f"n is {params.n}, but a request of the engine is one sequence: `sampling_params.children` makes "
                f"{params.n} of it.",
                "n",
            )
        if params.bad_words:
            raise InvalidRequestError(
                "bad_words are texts, and the engine takes token ids: `bad_words.expand` makes these of them.",
                "bad_words",
            )
        if params.structured_outputs is not None and not self.has_grammars:
            raise InvalidRequestError("This engine has no vocabulary for structured output.", "structured_outputs")
        if not prompt_ids:
            raise InvalidRequestError("The prompt is empty: it needs at least one token.", "prompt")
        if (num_tokens := len(prompt_ids) + len(output_ids)) >= self.max_total_tokens:
            raise ContextLengthError(num_tokens, self.max_total_tokens)
        for name, ids in (
            ("prompt", prompt_ids),
            ("output_ids", output_ids),
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", params.logit_bias or ()),
            ("allowed_token_ids", params.allowed_token_ids or ()),
            ("bad_words_token_ids", list(itertools.chain.from_iterable(params.bad_words_token_ids))),
        ):
            for token_id in ids:
                if type(token_id) is not int or not 0 <= token_id < self.vocab_size:
                    raise InvalidRequestError(
                        f"{name}: {token_id!r} is no token id; they are whole numbers from 0 to {self.vocab_size - 1}.",
                        name,
                    )
        self._check_allowed(params)
        if num_tokens >= self.limit(len(prompt_ids), params):
            raise InvalidRequestError(
                f"The request comes with {len(output_ids)} output tokens, so its limit is reached already.",
                "output_ids",
            )

    def limit(self, num_prompt: int, params: SamplingParams) -> int:
        """Tokens, of prompt and output, at which a request ends by length."""
        if params.max_tokens is None:
            return self.max_total_tokens
        # A request that makes no token ends when its prompt is computed, which is before this limit.
        return min(self.max_total_tokens, num_prompt + max(params.max_tokens, 1))

    def stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        """Token ids that end a request."""
        eos = () if params.ignore_eos else self.eos_token_ids
        return tuple(dict.fromkeys((*eos, *params.stop_token_ids)))

    def _check_allowed(self, params: SamplingParams) -> None:
        """Refuse what would leave a request no token to choose."""
        if params.allowed_token_ids is None:
            return
        barred = {ids[0] for ids in params.bad_words_token_ids if len(ids) == 1}
        if params.min_tokens:
            barred.update(self.stop_ids(params))
        if barred.issuperset(params.allowed_token_ids):
            raise InvalidRequestError(
                "allowed_token_ids: bad words and, before min_tokens, stop tokens bar every one of them.",
                "allowed_token_ids",
            )
