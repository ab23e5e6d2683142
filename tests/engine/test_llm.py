"""`LLM`: forms of prompts, stop strings, results in order, and an engine that stays sound after a fault."""

import itertools
import os
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.engine import Engine
from engine.errors import ContextLengthError, EngineDeadError, InvalidRequestError
from engine.llm import LLM, Logprob, RequestOutput
from engine.sampling_params import SamplingParams
from engine.step import StepPlan
from engine.text.tokenizer import Tokenizer
from tests import tiny_models
from tests.scripted import ScriptedRunner

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPT = [100, 5, 6]
EOS = tiny_models.EOS_ID


def scripted(answer: list[int], **info: object) -> tuple[LLM, ScriptedRunner]:
    """An `LLM` that answers every prompt with `answer`."""
    runner = ScriptedRunner(answer, **info)
    return LLM.from_engine(Engine(runner), tokenizer()), runner


def tokenizer() -> Tokenizer:
    return Tokenizer(tiny_models.tokenizer(), eos_token_ids=(EOS,))


def ids(text: str) -> list[int]:
    return tokenizer().encode(text)


def facts(result: RequestOutput) -> tuple[str, str | None, int | str | None]:
    (output,) = result.outputs
    return output.text, output.finish_reason, output.stop_reason


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tiny_models.llama(tmp_path_factory.mktemp("llama"))
    llm = LLM(
        folder,
        dtype="float32",
        max_model_len=128,
        block_size=16,
        num_gpu_blocks_override=64,
        device="cpu",
        num_threads=1,
    )
    yield llm
    llm.close()


@pytest.fixture(autouse=True)
def no_live_blocks(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test of the model nothing is left in its engine."""
    yield
    if "llm" in request.fixturenames:
        stats = request.getfixturevalue("llm").engine.stats()
        assert (stats.live_blocks, stats.num_running, stats.num_waiting) == (0, 0, 0)


def test_forms_of_a_prompt_give_the_same(llm: LLM) -> None:
    text = "The quick brown fox"
    forms: list[Any] = [text, ids(text), {"prompt": text}, {"prompt_token_ids": ids(text)}]
    results = llm.generate(forms, GREEDY, use_tqdm=False)
    assert [r.prompt for r in results] == [text, None, text, None]
    assert all(r.prompt_token_ids == ids(text) and r.finished for r in results)
    assert len({tuple(r.outputs[0].token_ids) for r in results}) == 1
    for form in forms:
        (alone,) = llm.generate(form, GREEDY, use_tqdm=False)
        assert alone.outputs == results[0].outputs


def test_text_is_the_tokens_decoded(llm: LLM) -> None:
    for result in llm.generate(["One, two", "def add", "She sells"], GREEDY, use_tqdm=False):
        output = result.outputs[0]
        assert len(output.token_ids) == 8
        assert (output.index, output.finish_reason, output.stop_reason) == (0, "length", None)
        assert output.text == tokenizer().decode(output.token_ids)


def test_results_are_in_the_order_of_the_prompts_with_each_its_params(llm: LLM) -> None:
    prompts = [[10 + i] * (1 + i % 5) for i in range(20)]
    params = [SamplingParams(temperature=0.0, max_tokens=20 - i, ignore_eos=True) for i in range(20)]
    results = llm.generate(prompts, params, use_tqdm=False)
    assert [r.prompt_token_ids for r in results] == prompts
    assert [len(r.outputs[0].token_ids) for r in results] == list(range(20, 0, -1))
    assert len({r.request_id for r in results}) == 20


def test_cached_tokens_of_a_repeated_prompt(llm: LLM) -> None:
    prompt = list(range(50, 90))
    first, second = (llm.generate(prompt, GREEDY, use_tqdm=False)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 32)
    assert first.outputs == second.outputs


def test_chat_uses_the_template(llm: LLM) -> None:
    chat = [{"role": "user", "content": "Count: one"}]
    text = "<|im_start|>user\nCount: one<|im_end|>\n<|im_start|>assistant\n"
    one = llm.chat(chat, GREEDY, use_tqdm=False)
    many = llm.chat([chat, [{"role": "system", "content": "Be brief."}, *chat]], GREEDY, use_tqdm=False)
    assert one[0].prompt == text
    assert one[0].outputs == many[0].outputs == llm.generate(text, GREEDY, use_tqdm=False)[0].outputs
    assert many[1].prompt is not None
    assert many[1].prompt.startswith("<|im_start|>system\nBe brief.")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("", "prompts[1]: The prompt is empty"),
        ([3, tiny_models.VOCAB_SIZE], f"prompts[1]: prompt: {tiny_models.VOCAB_SIZE} is no token id"),
        ([3] * 128, "prompts[1]: The prompt has 128 tokens"),
        ({"text": "a"}, "prompts[1]: a prompt is a string"),
        (None, "prompts[1]: a prompt is a string"),
    ],
)
def test_bad_prompt_is_named_and_nothing_starts(llm: LLM, bad: Any, message: str) -> None:
    steps = llm.engine.stats().steps
    with pytest.raises(InvalidRequestError, match=re.escape(message)):
        llm.generate(["fine", bad, "fine"], GREEDY, use_tqdm=False)
    assert not llm.engine.has_work()
    assert llm.engine.stats().steps == steps


def test_a_prompt_that_is_too_long_can_be_told_from_other_bad_ones(llm: LLM) -> None:
    with pytest.raises(ContextLengthError, match=r"prompts\[1\]: .*128 tokens") as raised:
        llm.generate(["fine", [3] * 128], GREEDY, use_tqdm=False)
    assert (raised.value.prompt_tokens, raised.value.max_tokens_total) == (128, 128)


def test_bad_chat_is_named(llm: LLM) -> None:
    good = [{"role": "user", "content": "a"}]
    with pytest.raises(InvalidRequestError, match=r"messages\[1\]: .*unknown role robot"):
        llm.chat([good, [{"role": "robot", "content": "b"}]], GREEDY, use_tqdm=False)


@pytest.mark.parametrize("messages", ["hello", None, 5, [[]], [None], [["hello"]], [5], [{"role": "user"}, "hello"]])
def test_what_is_no_chat_is_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"list of messages|refused the messages"):
        llm.chat(messages, GREEDY, use_tqdm=False)


@pytest.mark.parametrize("params", [{"temperature": 0.0}, [{"temperature": 0.0}], [None], "greedy", 5])
def test_what_are_no_sampling_params_is_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(InvalidRequestError, match="sampling_params takes SamplingParams"):
        llm.generate(["a"], params, use_tqdm=False)


def test_number_of_sampling_params_must_match(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="2 entries for 3 prompts"):
        llm.generate(["a", "b", "c"], [GREEDY, GREEDY], use_tqdm=False)


def test_no_prompts_give_no_results(llm: LLM) -> None:
    assert llm.generate([], GREEDY, use_tqdm=False) == []


def test_progress_bar_shows_tokens_per_second(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], GREEDY)
    shown = capfd.readouterr().err
    assert "2/2" in shown
    assert re.search(r"input [\d.]+ tok/s, output [\d.]+ tok/s", shown)
    llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    assert capfd.readouterr().err == ""


def test_stop_string_over_tokens_ends_in_the_engine() -> None:
    answer = ids("Hel") + ids("lo ST") + ids("OP")
    llm, _ = scripted([*answer, *ids(" rest and more")])
    params = [SamplingParams(max_tokens=len(answer) + 4, stop=stop) for stop in ("STOP", "other")]
    stopped, other = llm.generate([PROMPT, PROMPT], params, use_tqdm=False)
    assert facts(stopped) == ("Hello ", "stop", "STOP")
    assert stopped.outputs[0].token_ids == answer
    assert facts(other)[0].startswith("Hello STOP")
    assert facts(other)[1:] == ("length", None)
    stats = llm.engine.stats()
    assert (stats.live_blocks, stats.generation_tokens) == (0, 2 * len(answer) + 4)


def test_stop_string_at_the_last_allowed_token_is_a_stop() -> None:
    answer = ids("ab STOP")
    llm, _ = scripted(answer)
    (result,) = llm.generate(PROMPT, SamplingParams(max_tokens=len(answer), stop="STOP"), use_tqdm=False)
    assert facts(result) == ("ab ", "stop", "STOP")


def test_held_back_text_is_in_the_result() -> None:
    answer = ids("Hello ST")
    llm, _ = scripted(answer)
    (result,) = llm.generate(PROMPT, SamplingParams(max_tokens=len(answer), stop="STOP"), use_tqdm=False)
    assert facts(result) == ("Hello ST", "length", None)


def test_incomplete_character_at_the_end_is_one_replacement() -> None:
    answer = ids("A xyz") + ids("🌶")[:2]
    llm, _ = scripted(answer)
    (result,) = llm.generate(PROMPT, SamplingParams(max_tokens=len(answer)), use_tqdm=False)
    assert facts(result) == ("A xyz\ufffd", "length", None)


@pytest.mark.parametrize("skip_special_tokens", [True, False])
@pytest.mark.parametrize(("last", "stop_reason"), [(EOS, None), (90, 90)])
def test_eos_and_stop_tokens_end_without_text(last: int, stop_reason: int | None, skip_special_tokens: bool) -> None:
    answer = [*ids("ab"), last]
    llm, _ = scripted([*answer, 50])
    params = SamplingParams(stop_token_ids=[90], skip_special_tokens=skip_special_tokens)
    (result,) = llm.generate(PROMPT, params, use_tqdm=False)
    assert facts(result) == ("ab", "stop", stop_reason)
    assert result.outputs[0].token_ids == answer


def test_a_stop_token_is_text_where_that_is_asked_for() -> None:
    llm, _ = scripted([*ids("ab"), 90, 50])
    params = SamplingParams(stop_token_ids=[90], include_stop_str_in_output=True)
    (result,) = llm.generate(PROMPT, params, use_tqdm=False)
    assert facts(result) == (tokenizer().decode([*ids("ab"), 90]), "stop", 90)


def test_second_of_several_eos_ids_ends_without_text() -> None:
    llm, _ = scripted([*ids("ab"), 77, *ids("c")], eos_token_ids=(EOS, 77))
    (result,) = llm.generate(PROMPT, SamplingParams(), use_tqdm=False)
    assert facts(result) == ("ab", "stop", None)


def test_min_tokens_hold_for_stop_strings() -> None:
    x, stop = ids("x")[0], ids("S")[0]
    llm, _ = scripted([x, stop, x, x, stop, x, x, x])
    (result,) = llm.generate(PROMPT, SamplingParams(stop="S", min_tokens=5, max_tokens=8), use_tqdm=False)
    assert facts(result) == ("xSxx", "stop", "S")
    assert len(result.outputs[0].token_ids) == 5


def on_step(number: int, action: Callable[[], None]) -> Callable[[StepPlan], None]:
    steps = itertools.count(1)

    def before_step(plan: StepPlan) -> None:
        if next(steps) == number:
            action()

    return before_step


def fail() -> None:
    raise RuntimeError("out of luck")


@pytest.fixture
def _ctrl_c() -> Iterator[None]:
    """As in a terminal: what a shell starts in the background has the signal ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_ctrl_c")
def test_interrupt_waits_for_the_step_and_ends_all() -> None:
    llm, runner = scripted(ids("a"))
    runner.before_step = on_step(5, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        llm.generate([PROMPT] * 12, SamplingParams(max_tokens=40), use_tqdm=False)  # 8 run, 4 wait
    stats = llm.engine.stats()
    assert (stats.live_blocks, stats.num_running, stats.num_waiting, stats.steps) == (0, 0, 0, 5)
    assert len(runner.plans) == 5  # the fifth was finished
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    (result,) = llm.generate(PROMPT, SamplingParams(max_tokens=4), use_tqdm=False)
    assert facts(result)[0] == "aaaa"


def test_threads_take_turns(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    prompts = [f"hello {i}" for i in range(12)]
    alone = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda prompt: llm.generate(prompt, params, use_tqdm=False)[0], prompts))
    assert [output.outputs[0].token_ids for output in found] == alone


def test_failed_step_ends_its_requests_only() -> None:
    llm, runner = scripted(ids("a"), max_num_batched_tokens=64, max_num_seqs=8)
    runner.before_step = on_step(3, fail)
    prompts = [[100 + i, 5, 6] for i in range(12)]
    results = llm.generate(prompts, SamplingParams(max_tokens=6), use_tqdm=False)
    assert [facts(r)[:2] for r in results] == [("aa", "error")] * 8 + [("aaaaaa", "length")] * 4
    assert llm.engine.stats().live_blocks == 0


def test_a_closed_llm_says_so() -> None:
    llm, _ = scripted(ids("ab"))
    llm.close()
    llm.close()
    with pytest.raises(EngineDeadError, match="closed"):
        llm.generate("a", use_tqdm=False)


def test_dead_engine_raises_and_leaves_nothing() -> None:
    llm, runner = scripted(ids("a"))
    runner.before_step = lambda plan: fail()
    with pytest.raises(EngineDeadError):
        llm.generate([PROMPT] * 40, SamplingParams(max_tokens=6), use_tqdm=False)
    assert not llm.engine.has_work()
    assert llm.engine.stats().live_blocks == 0


def test_model_has_two_names_but_one_at_a_time(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="one setting"):
        LLM("a", model_path=str(tmp_path))
    with pytest.raises(ValueError, match="unknown setting max_seqs"):
        LLM("a", max_seqs=3)


def test_n_outputs_are_those_of_seeds_in_a_row(llm: LLM) -> None:
    sampled = SamplingParams(temperature=1.0, seed=7, n=3, max_tokens=12, ignore_eos=True)
    together, other = llm.generate(["The quick brown fox", "One"], sampled, use_tqdm=False)
    assert [output.index for output in together.outputs] == [0, 1, 2]
    for i, output in enumerate(together.outputs):
        alone = SamplingParams(temperature=1.0, seed=7 + i, max_tokens=12, ignore_eos=True)
        (result,) = llm.generate("The quick brown fox", alone, use_tqdm=False)
        assert result.outputs[0].token_ids == output.token_ids
    assert len({tuple(output.token_ids) for output in together.outputs}) == 3
    assert together.request_id != other.request_id


def test_the_prompt_of_n_outputs_is_computed_once() -> None:
    llm, runner = scripted(ids("ab"), max_num_batched_tokens=64)
    (result,) = llm.generate(list(range(3, 35)), SamplingParams(n=4, max_tokens=2), use_tqdm=False)
    assert [output.text for output in result.outputs] == ["ab"] * 4
    assert sum(plan.num_tokens for plan in runner.plans) == 32 + 3 + 4, "the others compute their last token alone"
    assert llm.engine.stats().live_blocks == 0


def test_sequences_of_one_prompt_stop_each_by_itself(llm: LLM) -> None:
    params = SamplingParams(temperature=1.5, seed=1, n=8, max_tokens=30, stop=["e", "a"], logprobs=0)
    (result,) = llm.generate("The quick", params, use_tqdm=False)
    assert {output.finish_reason for output in result.outputs} <= {"stop", "length"}
    assert len({len(output.token_ids) for output in result.outputs}) > 1
    for output in result.outputs:
        assert output.logprobs is not None
        assert [next(iter(entry)) for entry in output.logprobs] == output.token_ids


def test_logprobs_have_vllms_shape() -> None:
    answer = ids("x🌶y")
    llm, _ = scripted([*answer, EOS])
    params = SamplingParams(logprobs=3, prompt_logprobs=1, max_tokens=20)
    (result,) = llm.generate(PROMPT, params, use_tqdm=False)
    output = result.outputs[0]
    assert output.text == "x🌶y"
    assert output.token_ids == [*answer, EOS]
    assert output.logprobs is not None
    x = answer[0]
    assert output.logprobs[0] == {
        x: Logprob(-1.5, 2, "x"),
        x + 1: Logprob(-0.5, 1, "y"),
        x + 2: Logprob(-2.5, 3, "z"),
    }
    assert [entry[i].decoded_token for i, entry in zip(output.token_ids, output.logprobs, strict=True)] == [
        "x", r"bytes:\xf0", r"bytes:\x9f", r"bytes:\x8c", r"bytes:\xb6", "y", "<|im_end|>",
    ]  # fmt: skip
    assert output.cumulative_logprob == -1.5 * 7
    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs[0] is None
    assert [list(entry or ()) for entry in result.prompt_logprobs] == [[], [5, 6], [6, 7]]


def test_logprobs_end_with_the_stop_string_and_are_none_where_not_asked_for() -> None:
    answer = ids("ab STOP and more")
    llm, _ = scripted(answer)
    params = [SamplingParams(stop="STOP", logprobs=0, max_tokens=30), SamplingParams(max_tokens=3)]
    stopped, plain = llm.generate([PROMPT, PROMPT], params, use_tqdm=False)
    output = stopped.outputs[0]
    assert output.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids) < len(answer)
    assert all(len(entry) == 1 for entry in output.logprobs)
    assert (plain.outputs[0].logprobs, plain.outputs[0].cumulative_logprob, plain.prompt_logprobs) == (None,) * 3


def test_a_prompt_is_scored_with_no_token_made(llm: LLM) -> None:
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    (result,) = llm.generate("The quick brown fox", params, use_tqdm=False)
    assert facts(result) == ("", "length", None)
    assert result.outputs[0].token_ids == []
    assert result.prompt_logprobs is not None
    assert len(result.prompt_logprobs) == len(result.prompt_token_ids)
    assert all(entry is not None for entry in result.prompt_logprobs[1:])


def test_bad_words_are_not_in_the_text(llm: LLM) -> None:
    plain = SamplingParams(temperature=1.2, seed=5, max_tokens=60, ignore_eos=True)
    (before,) = llm.generate("The quick", plain, use_tqdm=False)
    word = tokenizer().decode(before.outputs[0].token_ids[20:22])
    assert word.strip()
    (after,) = llm.generate("The quick", replace(plain, bad_words=[word]), use_tqdm=False)
    assert after.outputs[0].token_ids[:20] == before.outputs[0].token_ids[:20]
    assert after.outputs[0].token_ids != before.outputs[0].token_ids


def test_a_bad_word_without_tokens_is_named() -> None:
    llm, _ = scripted(ids("a"))
    with pytest.raises(InvalidRequestError, match=r"prompts\[1\]: bad_words: "):
        llm.generate(["a", "b"], [GREEDY, replace(GREEDY, bad_words=["x" * 1000])], use_tqdm=False)
