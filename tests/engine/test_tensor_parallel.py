"""Models that several ranks share: the same tokens, logits and log probabilities as on one."""

import dataclasses
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.engine import Engine
from engine.outputs import TokenLogprobs
from engine.sampling_params import SamplingParams
from engine.text.tokenizer import load_tokenizer
from tests import reference, tiny_families, tiny_models
from tests.engine.sharded import Case, run_cases
from tests.engine.test_logprobs import Seen
from tests.engine.test_structured_steps import SPECS

PROMPTS = [[(7 + 5 * i + 11 * j) % 380 + 3 for j in range(length)] for i, length in enumerate((9, 50, 33, 17))]


@dataclasses.dataclass
class Result:
    """tokens by request; logits: of each sampled token, in the order of sampling."""

    tokens: dict[str, list[int]]
    logits: torch.Tensor
    seen: Seen
    stats: Any


def greedy(max_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **more)


def serve(engine: Engine, params: list[SamplingParams], rounds: int = 1) -> Result:
    """All prompts together, and all again, as often as `rounds` says."""
    rows: list[torch.Tensor] = []
    model, original = engine.runner.model, engine.runner.model.logits

    def record(hidden: torch.Tensor) -> torch.Tensor:
        result = original(hidden)
        rows.extend(result.clone())
        return result

    model.logits = record
    for attempt in range(rounds):
        for i, prompt in enumerate(PROMPTS):
            engine.add_request(f"{attempt} {i}", prompt, params[i % len(params)])
    seen = Seen(engine)
    return Result(seen.tokens, torch.stack(rows), seen, engine.stats())


def compare(result: Result, expected: Result) -> None:
    """Not by bits: a matrix product of fewer columns is added up elsewhere."""
    best = expected.logits.topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > reference.MIN_GAP, "a close call: choose another prompt"
    torch.testing.assert_close(result.logits, expected.logits, atol=1e-4, rtol=0)
    assert result.tokens == expected.tokens


def assert_same(size: int, cases: dict[str, Case]) -> None:
    """What `size` ranks make of the cases is what one makes of them."""
    results = run_cases(size, list(cases.values()))
    for result, expected in zip(results, run_cases(1, list(cases.values())), strict=True):
        compare(result, expected)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    made = {name: tiny_families.write(name, root / name) for name in tiny_families.CASES}
    return made | {
        # 4 heads; as many KV heads as ranks, fewer, one; vocabularies that no number of ranks divides.
        "four KV heads": tiny_models.llama(
            root / "mha", seed=10, num_key_value_heads=4, vocab_size=383, pad_token_id=None
        ),
        "one KV head": tiny_models.llama(
            root / "mqa", seed=7, num_key_value_heads=1, tie_word_embeddings=True, vocab_size=389
        ),
    }


def test_every_family_on_two_ranks(folders: dict[str, Path]) -> None:
    assert_same(2, {name: Case(folder, partial(serve, params=[greedy(8)])) for name, folder in folders.items()})


def test_four_ranks_of_which_several_have_the_same_kv_head(folders: dict[str, Path]) -> None:
    names = ("llama", "qwen2", "qwen3", "olmo2", "four KV heads", "one KV head")
    assert_same(4, {name: Case(folders[name], partial(serve, params=[greedy(8)])) for name in names})


ALL_SORTS = [
    greedy(48, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=-0.2, logprobs=3),
    SamplingParams(temperature=0.9, top_p=0.9, top_k=50, seed=5, max_tokens=48, logprobs=0, prompt_logprobs=2),
    SamplingParams(temperature=0.7, seed=6, structured_outputs=SPECS["schema"], max_tokens=60),
    greedy(48, logit_bias={9: 4.0}, min_tokens=3, bad_words_token_ids=((17,), (30, 31)), prompt_logprobs=0),
]

CONDITIONS: dict[str, dict[str, Any]] = {
    "chunks of 16": {"max_num_batched_tokens": 16},
    "no prefix cache": {"enable_prefix_caching": False},
    "a pool that preempts": {"num_gpu_blocks_override": 9, "max_model_len": 120},
    "two in flight": {"async_scheduling": True, "max_num_batched_tokens": 24},
    "swapped": {"num_gpu_blocks_override": 9, "max_model_len": 120, "swap_space": 0.01},
}


def test_all_that_a_request_may_ask_for_under_every_condition(folders: dict[str, Path]) -> None:
    cases = {
        name: Case(folders["llama"], partial(serve, params=ALL_SORTS, rounds=2), settings)
        for name, settings in CONDITIONS.items()
    }
    results = run_cases(2, list(cases.values()))
    expected = run_cases(1, list(cases.values()))
    for name, result, truth in zip(cases, results, expected, strict=True):
        assert result.tokens == truth.tokens, name
        for found, right in ((result.seen.logprobs, truth.seen.logprobs), (result.seen.prompts, truth.seen.prompts)):
            assert found.keys() == right.keys() != set()
            for request in found:
                assert_near(found[request], right[request])
        for request in ("0 2", "1 2"):
            json.loads(load_tokenizer(folders["llama"]).decode(result.tokens[request]))
    assert results[0].stats.cached_prompt_tokens > 0
    assert results[2].stats.preemptions > 0


def assert_near(found: Sequence[TokenLogprobs | None], right: Sequence[TokenLogprobs | None]) -> None:
    for one, other in zip(found, right, strict=True):
        if one is None or other is None:
            assert one is other
            continue
        assert (one.token_ids, one.rank) == (other.token_ids, other.rank)
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
