"""Log probabilities over HTTP: entries that end where the text does, in numbers that JSON has."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from app.openai.logprobs import LOWEST, chat_logprobs, completion_logprobs
from app.openai.responses import to_json
from app.openai.token_entries import EntryAligner, PromptScorer
from engine.outputs import TokenLogprobs
from engine.text.detokenizer import Detokenizer
from engine.text.token_text import TokenTexts
from engine.text.tokenizer import Tokenizer
from tests.app.conftest import Serve
from tests.app.harness import Server
from tests.app.http.test_http import error_of, ids_of_length
from tests.app.prompts.test_encoding import pieces
from tests.tiny_models import EOS_ID


def of_token(token_id: int) -> TokenLogprobs:
    return TokenLogprobs([token_id, token_id], [-1.0, -1.0], 1)


async def entries_of(server: Server, **body: Any) -> tuple[str, list[dict[str, Any]]]:
    """Text and entries, which must not depend on streaming."""
    choice = (await server.chat(logprobs=True, **body)).json()["choices"][0]
    events = await server.stream_chat(logprobs=True, **body)
    streamed = [
        entry
        for chunk in events.chunks
        if chunk["choices"][0]["logprobs"]
        for entry in chunk["choices"][0]["logprobs"]["content"]
    ]
    assert streamed == choice["logprobs"]["content"]
    return choice["message"]["content"], streamed


async def test_one_entry_for_each_token_of_the_text(scripted: Serve, tokenizer: Tokenizer) -> None:
    script = pieces(tokenizer, "Hello there")
    async with scripted([*script, EOS_ID]) as server:
        text, entries = await entries_of(server, top_logprobs=0)
        assert await entries_of(server) == (text, entries)
        assert text == "Hello there"
        assert [entry["token"] for entry in entries] == [tokenizer.decode([i]) for i in script]
        assert all(entry["top_logprobs"] == [] and entry["logprob"] == -1.5 for entry in entries)
        _, entries = await entries_of(server, top_logprobs=3)
        assert [[top["logprob"] for top in entry["top_logprobs"]] for entry in entries] == [[-0.5, -1.5, -2.5]] * len(
            script
        )
        assert entries[0]["top_logprobs"][1] == {key: entries[0][key] for key in ("token", "logprob", "bytes")}


async def test_entries_end_where_a_stop_string_cuts_the_text(scripted: Serve, tokenizer: Tokenizer) -> None:
    script = pieces(tokenizer, "Hel", "lo ST", "OP rest and more")
    async with scripted([*script, EOS_ID]) as server:
        text, entries = await entries_of(server, stop="STOP")
        assert text == "Hello "
        assert "".join(entry["token"] for entry in entries).startswith(text)
        kept = len(entries)
        assert len(tokenizer.decode(script[: kept - 1])) < len(text) <= len(tokenizer.decode(script[:kept]))
        text, entries = await entries_of(server, stop="STOP", include_stop_str_in_output=True)
        assert text == "Hello STOP"
        assert "".join(entry["token"] for entry in entries).startswith(text)


async def test_bytes_of_split_characters_make_the_text(scripted: Serve, tokenizer: Tokenizer) -> None:
    text = "ok 🌶 世界"
    async with scripted([*pieces(tokenizer, text), EOS_ID]) as server:
        shown, entries = await entries_of(server)
    assert shown == text
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == text
    assert any(entry["token"].startswith("bytes:") for entry in entries)
    assert len({entry["token"] for entry in entries if entry["token"].startswith("bytes:")}) > 1


@given(data=st.data())
def test_entries_are_those_of_the_text_however_the_tokens_come(tokenizer: Tokenizer, data: st.DataObject) -> None:
    text = data.draw(st.text(st.sampled_from("ab STOP🌶é世\n"), max_size=20))
    ids = tokenizer.encode(text) + data.draw(st.lists(st.integers(0, 383), max_size=6))
    stop = data.draw(st.lists(st.sampled_from(["STOP", "b", "é", "🌶a"]), max_size=2))
    detokenizer, aligner, shown_text, shown = (
        Detokenizer(tokenizer, stop=stop),
        EntryAligner(TokenTexts(tokenizer)),
        "",
        [],
    )
    at = 0
    while at < len(ids) and detokenizer.stop_reason is None:
        count = data.draw(st.integers(1, 4))
        some, before = ids[at : at + count], detokenizer.num_tokens
        at += count
        piece = detokenizer.push(some)
        if at >= len(ids):
            piece += detokenizer.finish()
        cut = detokenizer.stop_reason is not None
        some = some[: detokenizer.num_tokens - before]
        aligner.push(some, [of_token(i) for i in some])
        shown += aligner.show(piece, end=cut or at >= len(ids), cut=cut)
        shown_text += piece
    assert [entry.token_id for entry in shown] == ids[: len(shown)]
    made = b"".join(entry.token.data or b"" for entry in shown).decode(errors="replace")
    if detokenizer.stop_reason is None:
        assert (made, len(shown)) == (shown_text, len(ids))
    else:
        assert made.startswith(shown_text.rstrip("\ufffd"))
        assert all(entry.offset < len(shown_text) for entry in shown)


async def test_completions_have_their_own_form(scripted: Serve, tokenizer: Tokenizer) -> None:
    script = pieces(tokenizer, "Hello there")
    async with scripted([*script, EOS_ID]) as server:
        choice = (await server.complete("x", logprobs=2)).json()["choices"][0]
        events = await server.stream_complete("x", logprobs=2)
        plain = (await server.complete("x", logprobs=0)).json()["choices"][0]["logprobs"]
    logprobs = choice["logprobs"]
    texts = [tokenizer.decode([i], False) for i in [*script, EOS_ID]]
    assert logprobs["tokens"] == texts, "as many as completion_tokens: what ended the text is one of them"
    assert logprobs["token_logprobs"] == [-1.5] * len(texts)
    assert logprobs["text_offset"] == [len("".join(texts[:i])) for i in range(len(texts))]
    assert all(texts[i] in logprobs["top_logprobs"][i] for i in range(len(texts)))
    assert plain["top_logprobs"] == [{text: -1.5} for text in texts]
    streamed = [chunk["choices"][0]["logprobs"] for chunk in events.chunks if chunk["choices"][0]["logprobs"]]
    assert [token for part in streamed for token in part["tokens"]] == texts
    assert [offset for part in streamed for offset in part["text_offset"]] == logprobs["text_offset"]


@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_an_echoed_prompt_is_scored_as_transformers_does(
    real: Serve, tokenizer: Tokenizer, model_dir: Any, max_tokens: int
) -> None:
    prompt = "the quick brown fox é"
    ids = tokenizer.encode(prompt)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.no_grad():
        table = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = [table[i, ids[i + 1]].item() for i in range(len(ids) - 1)]
    async with real() as server:
        for given in (prompt, ids):
            body = {"echo": True, "logprobs": 1, "max_tokens": max_tokens, "temperature": 0}
            answer = (await server.complete(given, **body)).json()
            choice, usage = answer["choices"][0], answer["usage"]
            events = await server.stream_complete(given, **body)
            logprobs = choice["logprobs"]
            assert len(logprobs["token_logprobs"]) == len(ids) + max_tokens
            assert all(len(entries) == len(ids) + max_tokens for entries in logprobs.values())
            assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
            assert logprobs["token_logprobs"][1 : len(ids)] == pytest.approx(expected, abs=1e-3)
            best = [max(top.values()) for top in logprobs["top_logprobs"][1 : len(ids)]]
            assert best == pytest.approx(table[:-1].max(-1).values.tolist(), abs=1e-3)
            assert choice["text"].startswith(prompt)
            assert logprobs["text_offset"][0] == 0
            assert choice["text"][logprobs["text_offset"][1] :].startswith(logprobs["tokens"][1])
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(ids), max_tokens)
            assert choice["finish_reason"] == "length"
            assert (events.text, events.finish_reasons) == (choice["text"], ["length"])
            parts = [chunk["choices"][0]["logprobs"] for chunk in events.chunks if chunk["choices"][0]["logprobs"]]
            assert [token for part in parts for token in part["tokens"]] == logprobs["tokens"]
        await server.idle()


async def test_an_end_right_after_an_echoed_prompt_has_its_entry(scripted: Serve, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("some text")
    async with scripted([EOS_ID]) as server:
        body = {"echo": True, "logprobs": 1, "max_tokens": 1}
        choice = (await server.complete("some text", **body)).json()["choices"][0]
        events = await server.stream_complete("some text", **body)
    assert (choice["text"], choice["finish_reason"]) == ("some text", "stop")
    assert all(len(entries) == len(ids) + 1 for entries in choice["logprobs"].values())
    assert choice["logprobs"]["text_offset"][-1] == len("some text")
    parts = [chunk["choices"][0]["logprobs"] for chunk in events.chunks if chunk["choices"][0]["logprobs"]]
    assert [token for part in parts for token in part["tokens"]] == choice["logprobs"]["tokens"]


async def test_several_prompts_are_scored_apart(real: Serve) -> None:
    prompts = [ids_of_length(5), ids_of_length(9)]
    async with real() as server:
        alone = [
            (await server.complete(p, echo=True, logprobs=0, max_tokens=1, temperature=0)).json()["choices"][0]
            for p in prompts
        ]
        together = (await server.complete(prompts, echo=True, logprobs=0, max_tokens=1, temperature=0)).json()
        twice = (await server.complete(prompts, echo=True, logprobs=0, max_tokens=1, n=2, temperature=0)).json()
    for got, index in [(together["choices"], [0, 1]), (twice["choices"], [0, 0, 1, 1])]:
        for choice, expected in zip(got, index, strict=True):
            assert choice["logprobs"]["tokens"] == alone[expected]["logprobs"]["tokens"]
            assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(
                alone[expected]["logprobs"]["token_logprobs"][1:], abs=1e-3
            )
    assert twice["usage"]["prompt_tokens"] == 14


async def test_prompt_logprobs_are_by_token_id(scripted: Serve, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("some text")
    async with scripted() as server:
        for response in (
            await server.complete("some text", prompt_logprobs=2, max_tokens=1),
            await server.complete("some text", prompt_logprobs=2, max_tokens=0),
            await server.complete("some text", prompt_logprobs=2, echo=True, logprobs=4, max_tokens=1),
        ):
            scores = response.json()["choices"][0]["prompt_logprobs"]
            assert scores[0] is None
            assert [next(iter(score)) for score in scores[1:]] == [str(i) for i in ids[1:]]
            assert all(2 <= len(score) <= 3 for score in scores[1:])
            assert set(scores[1][str(ids[1])]) == {"logprob", "rank", "decoded_token"}
        chat = (await server.chat(prompt_logprobs=0, max_tokens=1)).json()
        assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
        error_of(await server.chat(prompt_logprobs=0, stream=True), 400)


async def test_tokens_come_with_the_answer_if_asked(scripted: Serve, tokenizer: Tokenizer) -> None:
    script = pieces(tokenizer, "Hello there")
    async with scripted([*script, EOS_ID]) as server:
        whole = (await server.complete("some text", return_token_ids=True)).json()
        assert whole["choices"][0]["token_ids"] == [*script, EOS_ID]
        assert whole["choices"][0]["prompt_token_ids"] == tokenizer.encode("some text")
        events = await server.stream_complete("some text", return_token_ids=True)
        assert [i for chunk in events.chunks for i in chunk["choices"][0]["token_ids"]] == [*script, EOS_ID]
        assert events.chunks[0]["choices"][0]["prompt_token_ids"] == tokenizer.encode("some text")
        chat = (await server.chat(return_token_ids=True)).json()
        assert chat["choices"][0]["token_ids"] == [*script, EOS_ID]
        events = await server.stream_chat(return_token_ids=True, stop="there")
        ids = [i for chunk in events.chunks for i in chunk["choices"][0]["token_ids"]]
        assert "there" in tokenizer.decode(ids)
        assert "there" not in tokenizer.decode(ids[:-1])
        assert events.chunks[0]["prompt_token_ids"] == chat["prompt_token_ids"]


def test_what_is_no_number_is_a_very_small_one(tokenizer: Tokenizer) -> None:
    texts = TokenTexts(tokenizer)
    scorer = PromptScorer(texts, [5, 6, 7], 1, begins_with_added=False)
    worst = TokenLogprobs([6, 8], [-math.inf, math.nan], 2)
    entries = scorer.entries([None, worst, TokenLogprobs([7, 9], [-1e30, -0.5], 3)])
    assert completion_logprobs(entries)["token_logprobs"] == [None, LOWEST, LOWEST]
    to_json(completion_logprobs(entries))
    to_json(chat_logprobs(entries[1:]))


def test_an_added_first_token_is_no_text_of_the_prompt(tokenizer: Tokenizer) -> None:
    scorer = PromptScorer(TokenTexts(tokenizer, skip_special_tokens=False), [1, 70, 71], 0, begins_with_added=True)
    entries = scorer.entries([None, of_token(70), of_token(71)])
    assert [entry.offset for entry in entries[:2]] == [0, 0]
    assert [entry.logprob for entry in entries] == [None, -1.0, -1.0]
    assert entries[0].token.text == "<|im_start|>"
