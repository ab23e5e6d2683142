"""Structured output through the engine's steps: it holds in any batch, at any depth, preempted and resumed."""

import json
from pathlib import Path

import pytest

from engine.engine import Engine
from engine.errors import InvalidRequestError
from engine.llm import LLM
from engine.outputs import Finished, FinishReason
from engine.sampling_params import SamplingParams
from engine.structured.spec import StructuredOutputSpec
from engine.text.tokenizer import Tokenizer, load_tokenizer
from tests import tiny_models
from tests.engine.build import build_engine
from tests.scripted import LateRunner, ScriptedRunner

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
SPECS = {
    "schema": StructuredOutputSpec(json_schema=json.dumps(SCHEMA)),
    "regex": StructuredOutputSpec(regex="[a-c]{3,6}-[0-9]+x"),
    "choice": StructuredOutputSpec(choice=("red", "green", "greenish")),
}
MODES = ("step by step", "two in flight", "late device")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


def engine_for(folder: Path, mode: str, **settings: object) -> Engine:
    engine = build_engine(folder, async_scheduling=mode != "step by step", **settings)
    if mode == "late device":
        engine.runner = LateRunner(engine.runner)
    return engine


def params(spec: StructuredOutputSpec | None, seed: int = 0, max_tokens: int = 120, **more: object) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=max_tokens, structured_outputs=spec, **more)


def run(engine: Engine) -> tuple[dict[str, list[int]], dict[str, Finished]]:
    tokens: dict[str, list[int]] = {}
    ended = {}
    while engine.has_work():
        output = engine.step()
        for request_id, token_id in zip(output.request_ids, output.token_ids, strict=True):
            tokens.setdefault(request_id, []).append(token_id)
        ended |= {finished.request_id: finished for finished in output.finished}
    return tokens, ended


def holds(name: str, text: str) -> bool:
    if name == "schema":
        value = json.loads(text)
        return set(value) == {"name", "age"} and isinstance(value["name"], str) and 0 <= value["age"] <= 99
    if name == "regex":
        import re

        return re.fullmatch("[a-c]{3,6}-[0-9]+x", text) is not None
    return text in ("red", "green", "greenish")


@pytest.mark.parametrize("mode", MODES)
def test_outputs_hold_and_are_the_same_alone_and_in_a_preempting_batch(
    folder: Path, tokenizer: Tokenizer, mode: str
) -> None:
    alone = engine_for(folder, "step by step")
    batch = engine_for(folder, mode, num_gpu_blocks_override=9, max_num_batched_tokens=16, max_model_len=200)
    expected = {}
    for i in range(12):
        name = list(SPECS)[i % 3]
        request = (str(i), [5 + i, 9, 11 + i], params(SPECS[name], seed=i, temperature=1.5))
        alone.add_request(*request)
        tokens, ended = run(alone)
        expected |= tokens
        if ended[str(i)].reason is FinishReason.STOP:
            assert holds(name, tokenizer.decode(tokens[str(i)]))
        batch.add_request(*request)
        batch.add_request(f"free {i}", [7, i + 3], SamplingParams(seed=i, max_tokens=30, ignore_eos=True))
    tokens, ended = run(batch)
    assert {name: ids for name, ids in tokens.items() if not name.startswith("free")} == expected
    assert batch.stats().preemptions > 0
    assert sum(end.reason is FinishReason.STOP for end in ended.values()) >= 8
    assert batch.stats().live_blocks == 0


@pytest.mark.parametrize("mode", MODES)
def test_a_resumed_output_goes_on_in_its_grammar(folder: Path, mode: str) -> None:
    engine = engine_for(folder, mode)
    engine.add_request("whole", [5, 9], params(SPECS["schema"], temperature=1.2))
    whole = run(engine)[0]["whole"]
    for cut in (1, len(whole) // 2, len(whole) - 1):
        engine.add_request("rest", [5, 9], params(SPECS["schema"], temperature=1.2), whole[:cut])
        assert run(engine)[0]["rest"] == whole[cut:]


def test_what_came_before_must_fit(folder: Path) -> None:
    engine = engine_for(folder, "step by step")
    with pytest.raises(InvalidRequestError, match="do not fit"):
        engine.add_request("a", [5], params(SPECS["choice"]), [300, 301])
    assert not engine.has_work()


def test_a_complete_output_ends_at_once_whatever_else_is_asked(folder: Path, tokenizer: Tokenizer) -> None:
    engine = engine_for(folder, "two in flight")
    spec = StructuredOutputSpec(regex="ab")
    engine.add_request("a", [5], params(spec, ignore_eos=True, min_tokens=50))
    tokens, ended = run(engine)
    assert tokenizer.decode(tokens["a"]) == "ab"
    assert ended["a"].reason is FinishReason.STOP


def test_settings_that_leave_no_token_end_the_request_with_an_error(folder: Path, tokenizer: Tokenizer) -> None:
    engine = engine_for(folder, "step by step")
    engine.add_request("a", [5], params(SPECS["choice"], allowed_token_ids=tokenizer.encode("z")))
    engine.add_request("b", [5], params(SPECS["choice"]))
    _, ended = run(engine)
    assert ended["a"].reason is FinishReason.ERROR
    assert "structured output" in (ended["a"].error or "")
    assert ended["b"].reason is FinishReason.STOP


def test_an_engine_without_a_vocabulary_refuses() -> None:
    with pytest.raises(InvalidRequestError, match="no vocabulary"):
        Engine(ScriptedRunner([5])).add_request("a", [1], params(SPECS["choice"]))


def test_llm_takes_it_with_several_outputs(folder: Path) -> None:
    llm = LLM(folder, dtype="float32", num_gpu_blocks_override=64)
    result = llm.generate(
        "pick", SamplingParams(n=4, max_tokens=40, structured_outputs=SPECS["choice"]), use_tqdm=False
    )
    assert len(result[0].outputs) == 4
    assert all(output.text in ("red", "green", "greenish") for output in result[0].outputs)
    llm.close()
