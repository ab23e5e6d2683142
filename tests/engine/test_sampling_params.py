"""What sampling parameters allow, what they say of the rest, and the n sequences that they make."""

import pickle
from typing import Any

import pytest

from engine.errors import InvalidRequestError
from engine.sampling_params import MAX_SEED, SamplingParams, children

BAD: list[tuple[str, Any, str]] = [
    ("n", 0, "1 to 128"),
    ("n", 129, "1 to 128"),
    ("n", 1.0, "whole number"),
    ("presence_penalty", 2.1, "-2 to 2"),
    ("presence_penalty", float("nan"), "nan"),
    ("frequency_penalty", -2.1, "-2 to 2"),
    ("frequency_penalty", "1", "number"),
    ("repetition_penalty", 0, "above 0"),
    ("repetition_penalty", 2.5, "at most 2"),
    ("logprobs", 21, "0 to 20"),
    ("logprobs", -1, "0 to 20"),
    ("logprobs", True, "whole number"),
    ("prompt_logprobs", 21, "0 to 20"),
    ("logit_bias", {-1: 1.0}, "-1"),
    ("logit_bias", {"5": 1.0}, "'5'"),
    ("logit_bias", {5: float("inf")}, "inf"),
    ("logit_bias", {5: None}, "None"),
    ("logit_bias", [5], r"\[5\]"),
    ("logit_bias", dict.fromkeys(range(1025), 1.0), "1025 entries; at most 1024"),
    ("allowed_token_ids", [], "empty"),
    ("allowed_token_ids", [1.5], "1.5"),
    ("allowed_token_ids", 5, "list of token ids"),
    ("bad_words", "word", "list of strings"),
    ("bad_words", [5], "list of strings"),
    ("bad_words", ["a", " "], "white space"),
    ("bad_words", ["a"] * 1025, "more than 1024"),
    ("bad_words_token_ids", [[]], "non-empty"),
    ("bad_words_token_ids", [[-1]], "-1"),
    ("bad_words_token_ids", [[1] * 129], "at most 128"),
    ("stop", 5, "list of strings"),
    ("stop", ["a", ""], "non-empty"),
    ("stop_token_ids", "ab", "list of token ids"),
    ("max_tokens", 0, "prompt_logprobs"),
    ("max_tokens", -1, "0 to"),
]


@pytest.mark.parametrize(("field", "value", "allowed"), BAD)
def test_what_is_not_allowed_is_refused_by_name(field: str, value: Any, allowed: str) -> None:
    with pytest.raises(InvalidRequestError, match=allowed) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
    assert field in str(caught.value)
    assert len(str(caught.value)) < 300


def test_bounds_are_allowed_and_biases_are_clamped() -> None:
    params = SamplingParams(
        n=128,
        presence_penalty=-2,
        frequency_penalty=2.0,
        repetition_penalty=0.01,
        logprobs=20,
        prompt_logprobs=0,
        max_tokens=0,
        logit_bias={3: 500, 4: -101.5, 5: 1},
        allowed_token_ids=[7, 3, 7],
    )
    assert params.logit_bias == {3: 100.0, 4: -100.0, 5: 1.0}
    assert params.allowed_token_ids == (7, 3)
    assert params.scores_only
    assert pickle.loads(pickle.dumps(params)) == params


def test_min_tokens_with_no_token_to_make_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="min_tokens is 1, more than max_tokens, which is 0"):
        SamplingParams(max_tokens=0, prompt_logprobs=1, min_tokens=1)


def test_children_have_seeds_in_a_row_and_the_first_scores_the_prompt() -> None:
    params = SamplingParams(n=3, seed=41, prompt_logprobs=2, logprobs=1, temperature=0.5)
    each = children(params)
    assert [child.seed for child in each] == [41, 42, 43]
    assert [child.prompt_logprobs for child in each] == [2, None, None]
    assert all((child.n, child.logprobs, child.temperature) == (1, 1, 0.5) for child in each)
    assert children(each[0]) == [each[0]]
    assert [child.prompt_logprobs for child in children(SamplingParams(n=2, max_tokens=0, prompt_logprobs=0))] == [0, 0]


def test_childrens_seeds_wrap_and_are_drawn_where_there_is_none() -> None:
    assert [child.seed for child in children(SamplingParams(n=3, seed=MAX_SEED - 1))] == [
        MAX_SEED - 1,
        MAX_SEED,
        -(2**63),
    ]
    assert [child.seed for child in children(SamplingParams(n=2, seed=-1))] == [-1, 0]
    drawn = [children(SamplingParams(n=2)) for _ in range(2)]
    assert all(a.seed is not None and b.seed == a.seed + 1 for a, b in drawn)
    assert drawn[0][0].seed != drawn[1][0].seed
