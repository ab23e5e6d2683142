"""Texts that an output may not have, as token ids: the expansion, and what is barred after some output."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from engine.errors import InvalidRequestError
from engine.sampling_params import MAX_BAD_WORD_TOKENS, SamplingParams


def expand(params: SamplingParams, encode: Callable[[str], Sequence[int]]) -> SamplingParams:
    """`params` with bad_words turned into bad_words_token_ids, each text with and without a space before it.

    encode: text to ids without special tokens. A word is barred as the tokenizer writes it at the beginning of a text
    and after a space; another spelling, split otherwise, gets through. Raises `InvalidRequestError`.
    """
    if not params.bad_words:
        return params
    sequences = dict.fromkeys(tuple(ids) for ids in params.bad_words_token_ids)
    for word in params.bad_words:
        bare = word.lstrip()
        for text in (bare, " " + bare):
            ids = tuple(encode(text))
            if not 0 < len(ids) <= MAX_BAD_WORD_TOKENS:
                raise InvalidRequestError(
                    f"bad_words: {word!r:.100} has {len(ids)} tokens; 1 to {MAX_BAD_WORD_TOKENS} are allowed.",
                    "bad_words",
                )
            sequences[ids] = None
    return replace(params, bad_words=(), bad_words_token_ids=tuple(sequences))


class BadSequences:
    """The sequences of two and more tokens of one request, found by the token before their last."""

    __slots__ = ("_by_token",)

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        self._by_token: dict[int, list[tuple[bytes, int]]] = {}
        for ids in sequences:
            if len(ids) > 1:
                before = np.array(ids[:-1], dtype=np.int32).tobytes()
                self._by_token.setdefault(ids[-2], []).append((before, ids[-1]))

    def __bool__(self) -> bool:
        return bool(self._by_token)

    def barred(self, output_ids: NDArray[np.int32]) -> list[int]:
        """Tokens that would complete a sequence after `output_ids`."""
        if not len(output_ids):
            return []
        candidates = self._by_token.get(int(output_ids[-1]))
        if candidates is None:
            return []
        tail = output_ids[-MAX_BAD_WORD_TOKENS:].tobytes()
        return [last for before, last in candidates if tail.endswith(before)]
