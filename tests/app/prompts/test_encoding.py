"""Stop strings, split characters and stop tokens, in a stream and not: the same text in both."""

import asyncio
from typing import Any

import pytest

from engine.text.tokenizer import Tokenizer
from tests.app.conftest import Serve
from tests.app.harness import Server
from tests.tiny_models import BOS_ID, EOS_ID


def pieces(tokenizer: Tokenizer, *texts: str) -> list[int]:
    return [token_id for text in texts for token_id in tokenizer.encode(text, add_special_tokens=False)]


async def both(server: Server, **body: Any) -> tuple[str, str, int]:
    """Text, finish reason and completion tokens, which must not depend on streaming."""
    whole = (await server.chat(**body)).json()
    choice = whole["choices"][0]
    events = await server.stream_chat(stream_options={"include_usage": True}, **body)
    assert events.done
    assert events.text == choice["message"]["content"]
    assert events.finish_reasons == [choice["finish_reason"]]
    assert events.usage["completion_tokens"] == whole["usage"]["completion_tokens"]
    await server.idle()
    return choice["message"]["content"], choice["finish_reason"], whole["usage"]["completion_tokens"]


async def test_a_stop_string_over_several_tokens_is_never_shown(scripted: Serve, tokenizer: Tokenizer) -> None:
    script = pieces(tokenizer, "Hel", "lo ST", "OP rest and more", "x" * 30)
    async with scripted(script) as server:
        text, reason, tokens = await both(server, stop="STOP")
        events = await server.stream_chat(stop="STOP")
        assert not any("ST" in str(chunk["choices"]) for chunk in events.chunks)
    assert (text, reason) == ("Hello ", "stop")
    assert tokens == len(pieces(tokenizer, "Hel", "lo ST", "OP"))


async def test_a_stop_string_within_a_token_cuts_it(scripted: Serve, tokenizer: Tokenizer) -> None:
    token = next(i for i in range(384) if len(tokenizer.decode([i])) >= 4 and tokenizer.decode([i]).isalpha())
    word = tokenizer.decode([token])
    async with scripted([*pieces(tokenizer, "see "), token, *pieces(tokenizer, "tail")]) as server:
        text, reason, _ = await both(server, stop=[word[:2]])
        assert (text, reason) == ("see ", "stop")
        text, reason, _ = await both(server, stop=[word[:2]], include_stop_str_in_output=True)
        assert (text, reason) == ("see " + word[:2], "stop")


async def test_what_was_held_back_is_delivered_at_the_end(scripted: Serve, tokenizer: Tokenizer) -> None:
    script = pieces(tokenizer, "the end ST")
    async with scripted(script) as server:
        assert await both(server, stop="STOP", max_tokens=len(script)) == ("the end ST", "length", len(script))
    async with scripted([*script, EOS_ID]) as server:
        assert await both(server, stop="STOP") == ("the end ST", "stop", len(script) + 1)


async def test_characters_split_over_tokens_arrive_whole(scripted: Serve, tokenizer: Tokenizer) -> None:
    text = "ok 🌶 世界 done"
    script = pieces(tokenizer, text)
    assert len(script) > len(text)  # the tiny vocabulary has no tokens for these characters
    async with scripted(script) as server:
        assert (await both(server, max_tokens=len(script)))[0] == text


async def test_a_character_cut_by_the_limit_is_one_replacement(scripted: Serve, tokenizer: Tokenizer) -> None:
    script = pieces(tokenizer, "A xyz🌶")
    async with scripted(script) as server:
        for missing in (1, 2, 3):
            text, reason, tokens = await both(server, max_tokens=len(script) - missing)
            assert (text, reason, tokens) == ("A xyz\ufffd", "length", len(script) - missing)
            assert text == tokenizer.decode(script[:-missing])


@pytest.mark.parametrize("eos", [2, 7])
async def test_any_of_several_eos_ids_ends_the_text(scripted: Serve, tokenizer: Tokenizer, eos: int) -> None:
    script = [*pieces(tokenizer, "abc"), eos, *pieces(tokenizer, "never")]
    async with scripted(script, eos_token_ids=(2, 7)) as server:
        assert await both(server) == ("abc", "stop", script.index(eos) + 1)
        text, reason, _ = await both(server, ignore_eos=True, max_tokens=len(script))
        assert reason == "length"
        assert text.endswith("never")


async def test_a_stop_token_ends_the_text_and_is_none_of_it(scripted: Serve, tokenizer: Tokenizer) -> None:
    stop = pieces(tokenizer, "z")
    async with scripted([*pieces(tokenizer, "abc"), *stop, *pieces(tokenizer, "def")]) as server:
        text, reason, tokens = await both(server, stop_token_ids=stop)
        assert (text, reason, tokens) == ("abc", "stop", len(pieces(tokenizer, "abc")) + 1)
        assert (await both(server, stop_token_ids=stop, include_stop_str_in_output=True))[0] == "abcz"


async def test_no_stop_counts_before_min_tokens(scripted: Serve, tokenizer: Tokenizer) -> None:
    script = pieces(tokenizer, "a#b#c#d#")
    async with scripted(script) as server:
        assert await both(server, stop="#", min_tokens=5) == ("a#b#c", "stop", 6)


async def test_tokens_without_text_do_no_harm(scripted: Serve, tokenizer: Tokenizer) -> None:
    script = [1, *pieces(tokenizer, "a"), 0, *pieces(tokenizer, "\u00e9")[:1], 1, *pieces(tokenizer, "b")]
    async with scripted(script) as server:
        text, _, tokens = await both(server, max_tokens=len(script))
        assert tokens == len(script)
        assert text == tokenizer.decode(script)


async def test_tokens_without_text_do_no_harm_to_others(real: Serve, tokenizer: Tokenizer) -> None:
    continuation, lead = pieces(tokenizer, "é")[1], pieces(tokenizer, "🌶")[0]
    async with real() as server:

        async def plain(prompt: str) -> Any:
            return (await server.complete(prompt, temperature=0, max_tokens=20, ignore_eos=True)).json()["choices"]

        async def odd(seed: int) -> Any:
            body = {"max_tokens": 20, "seed": seed, "ignore_eos": True, "return_token_ids": True}
            allowed = [BOS_ID, EOS_ID, continuation, lead]
            return (await server.complete("x", allowed_token_ids=allowed, **body)).json()["choices"][0]

        prompts = ("hello", "the quick brown fox")
        alone = [await plain(prompt) for prompt in prompts]
        *together, first, second = await asyncio.gather(*map(plain, prompts), odd(1), odd(2))
        assert together == alone
        for choice in (first, second):
            assert len(set(choice["token_ids"])) == 4
            assert (choice["text"], choice["finish_reason"]) == (tokenizer.decode(choice["token_ids"]), "length")
        await server.idle()
