"""Penalties, biases, allowed tokens and bad words: exact under every condition, and nothing to their neighbours."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from transformers import LogitsProcessorList, NoBadWordsLogitsProcessor, RepetitionPenaltyLogitsProcessor

from engine.engine import Engine
from engine.errors import InvalidRequestError
from engine.model_runner import ModelRunner
from engine.sampling_params import SamplingParams
from engine.step import StepPlan
from tests import reference, tiny_models
from tests.engine.build import OVERLAPPED, build_engine
from tests.scripted import LateRunner, ScriptedRunner, drain

PROMPTS = [[(3 + 5 * i + 11 * j) % 380 + 3 for j in range(length)] for i, length in enumerate((1, 15, 16, 17, 33, 50))]
LENGTH = 32

Change = Callable[[torch.Tensor, list[int], list[int]], torch.Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.llama(tmp_path_factory.mktemp("llama"))


def params(max_tokens: int = LENGTH, **more: object) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens} | more))


def truth(folder: Path, prompt: list[int], change: Change, num_tokens: int = LENGTH) -> list[int]:
    """Greedy tokens of transformers' logits after `change(logits, prompt, output)`; asserts that none is close."""
    output: list[int] = []
    for _ in range(num_tokens):
        logits = change(reference.logits(folder, [*prompt, *output])[-1].clone(), prompt, output)
        best = logits.topk(2)
        assert float(best.values[0] - best.values[1]) > reference.MIN_GAP, "a close call: choose another prompt"
        output.append(int(best.indices[0]))
    return output


def openai_penalties(presence: float = 0.0, frequency: float = 0.0) -> Change:
    """OpenAI's definition: mu[j] - c[j] * frequency - (c[j] > 0) * presence, with c over the output."""

    def change(logits: torch.Tensor, prompt: list[int], output: list[int]) -> torch.Tensor:
        for token_id in set(output):
            logits[token_id] -= presence + frequency * output.count(token_id)
        return logits

    return change


def repetition(penalty: float) -> Change:
    def change(logits: torch.Tensor, prompt: list[int], output: list[int]) -> torch.Tensor:
        return RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + output]), logits[None])[0]

    return change


def bad_words(sequences: list[list[int]]) -> Change:
    """transformers' own, which looks at the prompt as well: it is given the output alone."""

    def change(logits: torch.Tensor, prompt: list[int], output: list[int]) -> torch.Tensor:
        processors = LogitsProcessorList([NoBadWordsLogitsProcessor(sequences)])
        return processors(torch.tensor([output], dtype=torch.int64), logits[None])[0]

    return change


def bias(values: dict[int, float]) -> Change:
    def change(logits: torch.Tensor, prompt: list[int], output: list[int]) -> torch.Tensor:
        for token_id, value in values.items():
            logits[token_id] += value
        return logits

    return change


def allowed(ids: Sequence[int]) -> Change:
    def change(logits: torch.Tensor, prompt: list[int], output: list[int]) -> torch.Tensor:
        kept = torch.full_like(logits, -torch.inf)
        kept[list(ids)] = logits[list(ids)]
        return kept

    return change


def in_turn(*changes: Change) -> Change:
    def change(logits: torch.Tensor, prompt: list[int], output: list[int]) -> torch.Tensor:
        for one in changes:
            logits = one(logits, prompt, output)
        return logits

    return change


ALLOWED = list(range(40, 300, 3))
CASES: dict[str, tuple[dict[str, object], Change]] = {
    "presence": ({"presence_penalty": 2.0}, openai_penalties(presence=2.0)),
    "negative presence": ({"presence_penalty": -1.5}, openai_penalties(presence=-1.5)),
    "frequency": ({"frequency_penalty": 0.7}, openai_penalties(frequency=0.7)),
    "repetition": ({"repetition_penalty": 1.3}, repetition(1.3)),
    "less than one repetition": ({"repetition_penalty": 0.8}, repetition(0.8)),
    "all penalties": (
        {"presence_penalty": 0.4, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
        in_turn(repetition(1.2), openai_penalties(0.4, 0.3)),
    ),
    "bias": ({"logit_bias": {50: 3.0, 51: -100.0, 7: 2.5}}, bias({50: 3.0, 51: -100.0, 7: 2.5})),
    "allowed": ({"allowed_token_ids": ALLOWED}, allowed(ALLOWED)),
    "bias among allowed": (
        {"allowed_token_ids": ALLOWED, "logit_bias": {43: 2.0, 44: 100.0}, "frequency_penalty": 1.0},
        in_turn(bias({43: 2.0}), allowed(ALLOWED), openai_penalties(frequency=1.0)),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_are_those_of_transformers_logits(folder: Path, case: str) -> None:
    settings, change = CASES[case]
    engine = build_engine(folder)
    plain = {i: reference.greedy(folder, PROMPTS[i], LENGTH) for i in (1, 3)}
    for i in (1, 3):
        engine.add_request(str(i), PROMPTS[i], params(**settings))
    results = drain(engine)
    for i in (1, 3):
        assert results[str(i)] == truth(folder, PROMPTS[i], change)
    assert any(results[str(i)] != plain[i] for i in (1, 3)), "this case changes nothing, so it tests nothing"


def test_presence_and_frequency_leave_tokens_of_the_prompt_alone_and_repetition_does_not(folder: Path) -> None:
    prompt = PROMPTS[3]
    base = reference.logits(folder, prompt)[-1]
    ids = sorted(set(prompt))
    best = max(ids, key=lambda i: float(base[i]))
    near = max((i for i in range(384) if i not in ids and base[i] < base[best]), key=lambda i: float(base[i]))
    engine = build_engine(folder)
    # With nothing but these allowed, the first output token tells whether its place in the prompt was held against it.
    settings = {"max_tokens": 1, "allowed_token_ids": [best, near]}
    engine.add_request("none", prompt, params(**settings))
    engine.add_request("output", prompt, params(**settings, presence_penalty=2.0, frequency_penalty=2.0))
    engine.add_request("both", prompt, params(**settings, repetition_penalty=1.3))
    assert drain(engine) == {"none": [best], "output": [best], "both": [near]}


SEEDED = {"temperature": 0.9, "top_p": 0.95, "max_tokens": 40}
MIXED: list[dict[str, object]] = [
    SEEDED | {"seed": 0, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"repetition_penalty": 1.3, "max_tokens": 40},
    SEEDED | {"seed": 2},
    {"max_tokens": 40},
    SEEDED | {"seed": 4, "repetition_penalty": 1.2, "logit_bias": {9: 4.0, 10: 4.0}, "frequency_penalty": 1.5},
    {"allowed_token_ids": ALLOWED, "frequency_penalty": 1.0, "max_tokens": 40},
]

CONDITIONS: dict[str, dict[str, object]] = {
    "chunks of 3": {"max_num_batched_tokens": 3},
    "no prefix cache": {"enable_prefix_caching": False},
    "a pool that preempts": {"num_gpu_blocks_override": 9, "max_model_len": 120},
    **OVERLAPPED,
}


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[int, list[int]]:
    """Each of MIXED by itself; those with bad words of several tokens bar what they would have said."""
    engine = build_engine(folder)
    results = {}
    for i, prompt in enumerate(PROMPTS):
        engine.add_request("plain", prompt, params(**MIXED[i]))
        said = drain(engine)["plain"]
        bad = [said[4:6], said[20:23], [said[10]]]
        MIXED[i]["bad_words_token_ids"] = bad if i in (1, 2, 4) else ()
        engine.add_request("a", prompt, params(**MIXED[i]))
        results[i] = drain(engine)["a"]
        assert (results[i] != said) == (i in (1, 2, 4))
    return results


@pytest.mark.parametrize("order", [1, -1], ids=["in order", "in reverse"])
@pytest.mark.parametrize("condition", CONDITIONS)
def test_neighbours_order_and_preemption_change_nothing(
    folder: Path, alone: dict[int, list[int]], condition: str, order: int
) -> None:
    engine = build_engine(folder, **CONDITIONS[condition])
    if "late" in condition:
        engine.runner = LateRunner(engine.runner)
    for attempt in ("cold", "warm"):
        for i in range(len(PROMPTS))[::order]:
            engine.add_request(f"{attempt} {i}", PROMPTS[i], params(**MIXED[i]))
    results = drain(engine)
    for attempt in ("cold", "warm"):
        for i in range(len(PROMPTS)):
            assert results[f"{attempt} {i}"] == alone[i], f"{attempt} {i}"
    if "preempts" in condition:
        assert engine.stats().preemptions > 0
    assert engine.stats().live_blocks == 0
    assert engine.scheduler.batch.extras.num_users == 0


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("known", [1, 5, 21, 39])
def test_a_resumed_request_goes_on_with_its_counts_and_words(
    folder: Path, alone: dict[int, list[int]], known: int, overlap: bool
) -> None:
    engine = build_engine(folder, async_scheduling=overlap)
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(str(i), prompt, params(**MIXED[i]), alone[i][:known])
    results = drain(engine)
    for i in range(len(PROMPTS)):
        assert results[str(i)] == alone[i][known:]


def test_penalised_and_plain_requests_share_a_batch_in_either_order(folder: Path) -> None:
    plain, penalised = params(), params(frequency_penalty=1.0, repetition_penalty=1.2)
    expected = {
        "plain": reference.greedy(folder, PROMPTS[1], LENGTH),
        "penalised": truth(folder, PROMPTS[1], in_turn(repetition(1.2), openai_penalties(frequency=1.0))),
    }
    for first, second in (("plain", "penalised"), ("penalised", "plain")):
        engine = build_engine(folder)
        for name in (first, second):
            engine.add_request(name, PROMPTS[1], plain if name == "plain" else penalised)
        assert drain(engine) == expected


@pytest.mark.parametrize("mode", ["step by step", "two in flight", "late"])
def test_bad_words_bar_their_last_token_after_the_others(folder: Path, mode: str) -> None:
    said = reference.greedy(folder, PROMPTS[2], LENGTH)
    bad = [said[3:5], said[7:10], [said[15]], [*said[20:24]], [PROMPTS[2][-1], said[0]]]
    expected = truth(folder, PROMPTS[2], bad_words(bad))
    assert expected != said
    assert expected[0] == said[0], "the prompt's last token does not begin a bad word"
    engine = build_engine(folder, async_scheduling=mode != "step by step")
    if mode == "late":
        engine.runner = LateRunner(engine.runner)
    engine.add_request("a", PROMPTS[2], params(bad_words_token_ids=bad))
    engine.add_request("b", PROMPTS[4], params())
    results = drain(engine)
    assert results["a"] == expected
    assert results["b"] == reference.greedy(folder, PROMPTS[4], LENGTH)


def test_a_request_that_needs_its_last_token_is_not_planned_ahead_of_it() -> None:
    runner = ScriptedRunner([9, 8], eos_token_ids=())
    engine = Engine(runner, async_scheduling=True)
    engine.add_request("held", [5, 6], params(6, bad_words_token_ids=[[8, 7]]))
    engine.add_request("free", [5, 7], params(6))
    assert drain(engine) == {"held": [9, 8, 8, 8, 8, 8], "free": [9, 8, 8, 8, 8, 8]}
    held = [
        plan.token_ids[plan.query_start[1:][plan.rows == 0] - 1].tolist() for plan in runner.plans if 0 in plan.rows
    ]
    assert held == [[6], [9], [8], [8], [8], [8]], "its tokens are all known"
    assert any(plan.pending is not None for plan in runner.plans)
    barred = [plan.forbidden and plan.forbidden[1].tolist() for plan in runner.plans if 0 in plan.rows]
    assert barred == [None, None, [7], [7], [7], [7]]


def tables(engine: Engine) -> tuple[int, int]:
    assert isinstance(engine.runner, ModelRunner)
    rows = engine.runner.rows.tables
    return len(rows.bias), len(rows.seen)


def test_tables_as_wide_as_the_vocabulary_grow_with_the_requests_that_use_them(folder: Path) -> None:
    engine = build_engine(folder, max_num_seqs=16)
    for i in range(8):
        engine.add_request(str(i), PROMPTS[1], params(4, top_p=0.9, temperature=1.0, logprobs=3))
    drain(engine)
    assert tables(engine) == (0, 0)
    for _ in range(5):
        engine.add_request("a", PROMPTS[1], params(4, presence_penalty=1.0))
        engine.add_request("b", PROMPTS[1], params(4))
        drain(engine)
    assert tables(engine) == (0, 1)
    for i in range(6):
        engine.add_request(str(i), PROMPTS[i], params(4, frequency_penalty=1.0))
    drain(engine)
    assert tables(engine) == (0, 8)
    engine.add_request("a", PROMPTS[1], params(4, logit_bias={5: 1.0}))
    drain(engine)
    assert tables(engine) == (1, 8)


def test_a_plan_of_plain_requests_carries_no_extras() -> None:
    runner = ScriptedRunner([9], eos_token_ids=())
    engine = Engine(runner)
    engine.add_request("plain", [5], params(8, min_tokens=2, seed=1, temperature=1.0, top_k=5))
    engine.add_request("biased", [6], params(2, logit_bias={4: 1.0}))
    drain(engine)
    assert [plan.extras is None for plan in runner.plans] == [False, False, *[True] * 6]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", {384: 1.0}),
        ("allowed_token_ids", [3, 384]),
        ("bad_words_token_ids", [[3, 384]]),
        ("bad_words", ["not expanded"]),
        ("n", 2),
        ("stop_token_ids", [384]),
    ],
)
def test_what_the_engine_cannot_take_is_refused_by_name(field: str, value: object) -> None:
    engine = Engine(ScriptedRunner([5]))
    with pytest.raises(InvalidRequestError) as caught:
        engine.add_request("bad", [1], params(**{field: value}))
    assert caught.value.param == field
    assert field in str(caught.value)
    engine.add_request("next", [1], params(2))
    assert drain(engine)["next"] == [5, 5]


def test_allowed_tokens_that_are_all_barred_are_refused() -> None:
    engine = Engine(ScriptedRunner([5], eos_token_ids=(2,)))
    for more in ({"min_tokens": 1, "ignore_eos": False, "allowed_token_ids": [2]},
                 {"bad_words_token_ids": [[7]], "allowed_token_ids": [7]}):  # fmt: skip
        with pytest.raises(InvalidRequestError, match="allowed_token_ids"):
            engine.add_request("bad", [1], params(4, **more))


def test_a_request_that_a_failed_step_set_back_keeps_its_counts(folder: Path) -> None:
    settings = {"frequency_penalty": 1.0, "repetition_penalty": 1.2}
    expected = truth(folder, PROMPTS[1], in_turn(repetition(1.2), openai_penalties(frequency=1.0)))
    engine = build_engine(folder, async_scheduling=True)
    engine.add_request("lost", PROMPTS[3], params(**settings))
    engine.step()
    launch = engine.runner.launch

    def fail(plan: StepPlan) -> None:
        engine.runner.launch = launch
        raise RuntimeError("made to fail")

    engine.runner.launch = fail
    engine.step()
    engine.add_request("set back", PROMPTS[1], params(**settings), expected[:9])
    results = drain(engine)
    assert "lost" not in results
    assert results["set back"] == expected[9:]
