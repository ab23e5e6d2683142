"""Bad words as token ids, and what they bar."""

import numpy as np
import pytest

from engine.bad_words import BadSequences, expand
from engine.errors import InvalidRequestError
from engine.sampling_params import SamplingParams
from tests import tiny_models


def encode(text: str) -> list[int]:
    ids: list[int] = tiny_models.tokenizer().encode(text, add_special_tokens=False)
    return ids


def test_words_are_barred_with_and_without_a_space_before_them() -> None:
    params = expand(SamplingParams(bad_words=["fox", " zebra"], bad_words_token_ids=[[5]], seed=3), encode)
    assert params.bad_words == ()
    assert params.seed == 3
    forms = [[5], encode("fox"), encode(" fox"), encode("zebra"), encode(" zebra")]
    assert [list(ids) for ids in params.bad_words_token_ids] == forms
    assert len({len(ids) for ids in forms}) > 1, "forms of different lengths are among them"
    assert expand(params, encode) == params


def test_forms_that_are_the_same_are_there_once() -> None:
    assert expand(SamplingParams(bad_words=["a", "a"]), lambda text: [7]).bad_words_token_ids == ((7,),)


@pytest.mark.parametrize("ids", [[], [1] * 129])
def test_a_word_without_tokens_or_with_too_many_is_refused(ids: list[int]) -> None:
    with pytest.raises(InvalidRequestError, match=rf"'word' has {len(ids)} tokens; 1 to 128"):
        expand(SamplingParams(bad_words=["word"]), lambda text: ids)


def test_the_last_token_is_barred_where_all_before_it_match() -> None:
    bad = BadSequences([[1, 2, 3], [2, 4], [2, 2, 5], [9], [2, 2, 2]])

    def barred(*output: int) -> list[int]:
        return sorted(bad.barred(np.array(output, dtype=np.int32)))

    assert barred() == barred(1) == barred(9) == []
    assert barred(2) == [4], "too short for the others"
    assert barred(1, 2) == [3, 4]
    assert barred(7, 1, 2) == [3, 4]
    assert barred(2, 2) == [2, 4, 5]
    assert barred(1, 2, 7) == []
    assert not BadSequences([[9], [8]]), "single tokens are a bias"
