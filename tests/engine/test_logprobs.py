"""Log probabilities of outputs and of prompts: equal to transformers' log_softmax, under every condition."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.engine import Engine
from engine.model_runner import ModelRunner
from engine.outputs import Finished, StepOutput, TokenLogprobs
from engine.sampling_params import SamplingParams
from tests import reference, tiny_models
from tests.engine.build import OVERLAPPED, build_engine
from tests.scripted import LateRunner, ScriptedRunner

PROMPTS = [[(3 + 5 * i + 11 * j) % 380 + 3 for j in range(length)] for i, length in enumerate((1, 15, 16, 17, 33, 50))]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {"llama": tiny_models.llama(root / "llama"), "qwen3": tiny_models.qwen3(root / "qwen3")}


def params(max_tokens: int = 8, **more: object) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens} | more))


class Seen:
    """All that an engine puts out until it is at rest, after what it has put out already, by request."""

    def __init__(self, engine: Engine, before: Sequence[StepOutput] = ()) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[TokenLogprobs]] = {}
        self.prompts: dict[str, list[TokenLogprobs | None]] = {}
        self.ends: dict[str, Finished] = {}
        for output in before:
            self.take(output)
        while engine.has_work():
            self.take(engine.step())

    def take(self, output: StepOutput) -> None:
        for name, token_id in zip(output.request_ids, output.token_ids, strict=True):
            self.tokens.setdefault(name, []).append(token_id)
        for name, entries in output.logprobs.items():
            assert len(entries) == output.request_ids.count(name)
            self.logprobs.setdefault(name, []).extend(entries)
        for name, prompt in output.prompt_logprobs.items():
            assert name not in self.prompts, "delivered twice"
            assert len(self.tokens.get(name, ())) <= 1, "with the first token"
            self.prompts[name] = prompt
        for end in output.finished:
            assert end.request_id not in self.ends
            self.ends[end.request_id] = end


def assert_true(entries: Sequence[TokenLogprobs | None], truth: torch.Tensor, ids: Sequence[int], num_top: int) -> None:
    """truth: logits [n, vocab] of the places of `ids`."""
    assert len(entries) == len(ids)
    for entry, row, token_id in zip(entries, torch.log_softmax(truth, dim=-1), ids, strict=True):
        assert entry is not None
        assert entry.token_ids[0] == token_id
        assert len(entry.token_ids) == len(entry.logprobs) == 1 + num_top
        assert entry.logprobs == pytest.approx(row[entry.token_ids].tolist(), abs=1e-4)
        assert entry.logprobs[1:] == pytest.approx(row.topk(num_top).values.tolist(), abs=1e-4)
        assert entry.logprobs[1:] == sorted(entry.logprobs[1:], reverse=True)
        assert abs(entry.rank - 1 - int((row > row[token_id]).sum())) <= int(((row - row[token_id]).abs() < 1e-4).sum())


@pytest.mark.parametrize("model", ["llama", "qwen3"])
@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_logprobs_of_outputs_equal_transformers(folders: dict[str, Path], model: str, num_top: int) -> None:
    engine = build_engine(folders[model])
    controls: list[dict[str, Any]] = [
        {},
        {"temperature": 1.3, "top_k": 30, "seed": 3},
        {"frequency_penalty": 2.0, "logit_bias": {9: 50.0}},
        {"allowed_token_ids": [5, 6, 7], "temperature": 0.7, "seed": 1},
    ]
    for i, more in enumerate(controls):
        engine.add_request(str(i), PROMPTS[i], params(logprobs=num_top, **more))
    engine.add_request("none", PROMPTS[4], params())
    seen = Seen(engine)
    assert set(seen.logprobs) == {"0", "1", "2", "3"}
    for i in range(len(controls)):
        ids = seen.tokens[str(i)]
        truth = reference.logits(folders[model], [*PROMPTS[i], *ids])[len(PROMPTS[i]) - 1 : -1]
        assert_true(seen.logprobs[str(i)], truth, ids, num_top)


CONDITIONS: dict[str, dict[str, object]] = {
    "alone": {},
    "chunks of 3": {"max_num_batched_tokens": 3},
    "chunks of 16": {"max_num_batched_tokens": 16},
    "no chunks": {"enable_chunked_prefill": False},
    "a pool that preempts": {"num_gpu_blocks_override": 9, "max_model_len": 120},
    **OVERLAPPED,
    "two in flight, chunks of 3": {"async_scheduling": True, "max_num_batched_tokens": 3},
}


@pytest.mark.parametrize("condition", CONDITIONS)
def test_logprobs_are_true_under_every_condition(folders: dict[str, Path], condition: str) -> None:
    folder = folders["llama"]
    engine = build_engine(folder, **CONDITIONS[condition])
    if "late" in condition:
        engine.runner = LateRunner(engine.runner)
    num_top = {"0": 2, "1": None, "2": 0, "3": 5, "4": 1, "5": 3}
    for attempt in ("cold", "warm"):
        for i, prompt in enumerate(PROMPTS):
            top = num_top[str(i)]
            engine.add_request(f"{attempt} {i}", prompt, params(40, logprobs=top, prompt_logprobs=top))
    seen = Seen(engine)
    for attempt in ("cold", "warm"):
        for i, prompt in enumerate(PROMPTS):
            name, top = f"{attempt} {i}", num_top[str(i)]
            if top is None:
                assert name not in seen.logprobs
                assert name not in seen.prompts
                continue
            ids = seen.tokens[name]
            truth = reference.logits(folder, [*prompt, *ids])
            assert_true(seen.logprobs[name], truth[len(prompt) - 1 : -1], ids, top)
            assert seen.prompts[name][0] is None
            assert_true(seen.prompts[name][1:], truth[: len(prompt) - 1], prompt[1:], top)
            assert seen.ends[name].num_cached_tokens == 0
    if "preempts" in condition:
        assert engine.stats().preemptions > 0
    stats = engine.stats()
    assert (stats.live_blocks, stats.num_running, engine.scheduler.batch.extras.num_users) == (0, 0, 0)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("budget", [3, 16, 1000])
def test_a_prompt_is_scored_with_no_token_made(folders: dict[str, Path], budget: int, overlap: bool) -> None:
    folder = folders["llama"]
    engine = build_engine(folder, max_num_batched_tokens=budget, async_scheduling=overlap)
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(str(i), prompt, params(0, prompt_logprobs=1))
    engine.add_request("plain", PROMPTS[3], params())
    seen = Seen(engine)
    assert seen.tokens == {"plain": reference.greedy(folder, PROMPTS[3], 8)}
    for i, prompt in enumerate(PROMPTS):
        truth = reference.logits(folder, prompt)[:-1]
        assert_true(seen.prompts[str(i)][1:], truth, prompt[1:], 1)
        end = seen.ends[str(i)]
        assert (end.reason, end.num_output_tokens, end.num_prompt_tokens) == ("length", 0, len(prompt))
    assert engine.stats().live_blocks == 0
    assert engine.stats().generation_tokens == 8


def test_prompts_are_scored_a_few_rows_at_a_time(folders: dict[str, Path]) -> None:
    engine = build_engine(folders["llama"], max_num_seqs=4, max_num_batched_tokens=64)
    assert isinstance(engine.runner, ModelRunner)
    rows: list[int] = []
    logits = engine.runner.model.logits

    def count(hidden: torch.Tensor) -> torch.Tensor:
        rows.append(len(hidden))
        return logits(hidden)

    engine.runner.model.logits = count
    engine.add_request("a", PROMPTS[5], params(1, prompt_logprobs=0))
    Seen(engine)
    assert rows == [16, 16, 16, 1, 1], "49 of the prompt, and the one that is sampled from"


def test_a_scored_prompt_fills_the_cache_and_does_not_read_it(folders: dict[str, Path]) -> None:
    engine = build_engine(folders["llama"])
    prompt = PROMPTS[4]
    cached = {}
    for name, scored in (("cold", None), ("scored", 0), ("warm", None)):
        engine.add_request(name, prompt, params(2, prompt_logprobs=scored))
        cached[name] = Seen(engine).ends[name].num_cached_tokens
    assert cached == {"cold": 0, "scored": 0, "warm": 32}


def test_a_resumed_request_gets_its_prompt_scores_no_second_time(folders: dict[str, Path]) -> None:
    engine = build_engine(folders["llama"])
    expected = reference.greedy(folders["llama"], PROMPTS[1], 8)
    engine.add_request("a", PROMPTS[1], params(logprobs=1, prompt_logprobs=1), expected[:3])
    seen = Seen(engine)
    assert seen.tokens["a"] == expected[3:]
    assert seen.prompts == {}
    truth = reference.logits(folders["llama"], [*PROMPTS[1], *expected])[len(PROMPTS[1]) + 2 : -1]
    assert_true(seen.logprobs["a"], truth, expected[3:], 1)


@pytest.mark.parametrize("overlap", [False, True])
def test_an_aborted_request_leaves_no_logprobs_and_its_neighbour_whole(overlap: bool) -> None:
    engine = Engine(ScriptedRunner([9, 8, 7], eos_token_ids=(), max_num_batched_tokens=8), async_scheduling=overlap)
    for name in ("a", "b"):
        engine.add_request(name, list(range(12)), params(6, logprobs=2, prompt_logprobs=1))
    outputs = [engine.step() for _ in range(3)]
    engine.abort("a")
    seen = Seen(engine, outputs)
    assert len(seen.logprobs.get("a", ())) == len(seen.tokens.get("a", ())) < 6
    assert [entry.token_ids[0] for entry in seen.logprobs["b"]] == seen.tokens["b"] == [9, 8, 7, 7, 7, 7]
    assert [entry and entry.token_ids for entry in seen.prompts["b"]] == [None, *([i, i + 1] for i in range(1, 12))]
    assert engine.scheduler.batch.extras.num_users == 0


def test_a_prompt_of_one_token_has_no_scores_but_is_answered() -> None:
    engine = Engine(ScriptedRunner([9]))
    engine.add_request("scored", [5], params(0, prompt_logprobs=2))
    engine.add_request("both", [6], params(1, prompt_logprobs=2))
    seen = Seen(engine)
    assert seen.prompts == {"scored": [None], "both": [None]}
    assert seen.tokens == {"both": [9]}
    assert seen.ends["scored"].num_output_tokens == 0
