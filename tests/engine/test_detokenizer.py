"""The incremental text of a request against `decode` of all its ids, for byte-level and SentencePiece kinds."""

from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from engine.text.detokenizer import Detokenizer
from engine.text.tokenizer import Tokenizer

WORDS = ["Hel", "lo ST", "OP rest", "DEF", "ST", "OP", "A xyz", " ", "\n", "the ", "aa", "aba", "\n\nUser:"]
EMOJI = "ok 🌶 世界 done"


class SmallTokenizer(Tokenizer):
    def __init__(self, backend: Backend) -> None:
        super().__init__(PreTrainedTokenizerFast(tokenizer_object=backend), eos_token_ids=())
        self.backend = backend
        self.ids_tried = [-1, *range(backend.get_vocab_size() + 25)]  # with gaps and ids outside the vocabulary

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return super().decode([i for i in ids if i >= 0], skip_special_tokens)

    def id_of(self, token: str) -> int:
        token_id = self.backend.token_to_id(token)
        assert token_id is not None, token
        return token_id


def _byte_chars() -> dict[int, str]:
    """GPT-2's printable character for each byte."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    chars = {byte: chr(byte) for byte in kept}
    for byte in range(256):
        if byte not in chars:
            chars[byte] = chr(256 + len(chars) - len(kept))
    assert set(chars.values()) == set(ByteLevel.alphabet())
    return chars


@cache
def byte_level() -> SmallTokenizer:
    """Every byte, some words, parts of characters, a gap in the ids and added tokens."""
    chars = _byte_chars()
    pieces = [bytes((byte,)) for byte in range(256)]
    pieces += [word.encode() for word in WORDS if len(word) > 1]
    pieces += [
        "🌶".encode()[:2],
        "🌶".encode()[2:],
        "世".encode()[:2],
        b"a\xe4\xb8",
        b"\x96\xe7",
        b"\xed\xa0",
        b"\xf4\x90",
    ]
    vocab = {"".join(chars[byte] for byte in piece): i for i, piece in enumerate(pieces)}
    vocab["z~"] = len(pieces) + 20  # leaves a gap
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>", "<|im start|>"])
    backend.add_tokens([AddedToken("two words"), AddedToken("<think>")])
    return SmallTokenizer(backend)


@cache
def llama2_like() -> SmallTokenizer:
    """SentencePiece BPE as Llama 2 has it: byte fallback, a leading space that is dropped."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [
        "▁",
        "▁▁",
        "▁the",
        "lo▁ST",
        "OP▁rest",
        "Hel",
        "DEF",
        "ST",
        "OP",
        "A▁xyz",
        "a",
        "aba",
        "é",
        "�",
        "<0xZZ>",
        "ok",
        "done",
    ]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return SmallTokenizer(backend)


TOKENIZERS = {"byte_level": byte_level, "llama2_like": llama2_like}
both_kinds = pytest.mark.parametrize("kind", sorted(TOKENIZERS))


def byte_ids(kind: str, data: bytes) -> list[int]:
    if kind == "byte_level":
        return list(data)
    return [llama2_like().id_of(f"<0x{byte:02X}>") for byte in data]


def word_ids(kind: str, *words: str) -> list[int]:
    chars = _byte_chars()
    if kind == "byte_level":
        return [byte_level().id_of("".join(chars[byte] for byte in word.encode())) for word in words]
    return [llama2_like().id_of(word.replace(" ", "▁")) for word in words]


def split(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    return [ids[a:b] for a, b in pairwise(edges)]


def stream(detokenizer: Detokenizer, pushes: list[list[int]]) -> list[str]:
    return [*(detokenizer.push(ids) for ids in pushes), detokenizer.finish()]


def visible(tokenizer: SmallTokenizer, ids: list[int], skip: bool) -> str:
    """All text of `ids`, without an incomplete character at the end."""
    if tokenizer.token_bytes is None:  # a run of bytes has its text up to the character that is incomplete
        ids = [i for i in ids if tokenizer.decode([i], skip) or tokenizer.decode([i, i], skip)]
        for left_out in range(min(4, len(ids))):
            text = tokenizer.decode(ids[: len(ids) - left_out], skip)
            if not text.endswith("\ufffd"):
                return text
    return tokenizer.decode(ids, skip).rstrip("\ufffd")


def cut_by_definition(tokenizer, ids, skip, stop, include, min_tokens):
    """(text, stop string, tokens) from whole decodes; right for stop strings without U+FFFD."""
    seen = 0
    for n in range(1, len(ids) + 1):
        text = visible(tokenizer, ids[:n], skip)
        if n >= max(1, min_tokens):
            ends = [(text.find(s, max(0, seen - len(s) + 1)), order) for order, s in enumerate(stop)]
            if found := sorted(hit for hit in ends if hit[0] >= 0):
                start, order = found[0]
                return text[: start + (len(stop[order]) if include else 0)], stop[order], n
        seen = len(text)
    return tokenizer.decode(ids, skip), None, len(ids)


@st.composite
def id_lists(draw: st.DrawFn, kind: str) -> list[int]:
    """Random ids of the vocabulary and outside it, with many bytes of characters whole and broken."""
    tokenizer = TOKENIZERS[kind]()
    any_id = st.sampled_from(tokenizer.ids_tried)
    special = st.sampled_from(sorted(tokenizer.special_ids))
    lead_or_tail = st.sampled_from(byte_ids(kind, b"\x41\x20\x80\xbf\xc3\xe0\xa0\xed\x9f\xf0\x90\xf4\x8f\xe4\xbd"))
    few_last = st.sampled_from(tokenizer.ids_tried[-40:])
    character = st.sampled_from(list("aé世🌶 \n\ufffd")).map(lambda c: byte_ids(kind, c.encode()))
    one = st.one_of(any_id, special, lead_or_tail, few_last).map(lambda i: [i])
    return [i for part in draw(st.lists(st.one_of(one, character), max_size=24)) for i in part]


@both_kinds
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_joined_stream_is_decode_of_all_ids(kind: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]()
    ids = data.draw(id_lists(kind))
    skip = data.draw(st.booleans())
    pushes = split(ids, data.draw(st.lists(st.integers(0, 60), max_size=30)))
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    assert "".join(stream(detokenizer, pushes)) == tokenizer.decode(ids, skip)
    assert detokenizer.num_tokens == len(ids)


@both_kinds
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_stop_strings_cut_where_whole_decodes_say(kind: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]()
    ids = data.draw(id_lists(kind))
    skip, include = data.draw(st.booleans()), data.draw(st.booleans())
    min_tokens = data.draw(st.integers(0, 8))
    texts = st.text(st.sampled_from("aéST OPb世\n<"), min_size=1, max_size=4)
    whole = visible(tokenizer, ids, skip).replace("\ufffd", "")
    if whole:  # stop strings that are likely to occur
        starts = st.integers(0, len(whole) - 1)
        texts = texts | st.tuples(starts, st.integers(1, 6)).map(lambda p: whole[p[0] : p[0] + p[1]])
    stop = data.draw(st.lists(texts, min_size=1, max_size=4))
    pushes = split(ids, data.draw(st.lists(st.integers(0, 60), max_size=30)))
    detokenizer = Detokenizer(
        tokenizer, skip_special_tokens=skip, stop=stop, include_stop_str_in_output=include, min_tokens=min_tokens
    )
    text = "".join(stream(detokenizer, pushes))
    expected = cut_by_definition(tokenizer, ids, skip, stop, include, min_tokens)
    assert (text, detokenizer.stop_reason, detokenizer.num_tokens) == expected


@settings(max_examples=500, deadline=None)
@given(st.lists(st.binary(max_size=6) | st.sampled_from([c.encode()[:n] for c in "é世🌶" for n in (1, 2, 3, 4)])))
def test_python_replaces_invalid_utf8_as_the_tokenizer_does(chunks: list[bytes]) -> None:
    ids = list(b"".join(chunks))
    detokenizer = Detokenizer(byte_level())
    assert "".join(stream(detokenizer, [[i] for i in ids])) == byte_level().decode(ids)


@both_kinds
def test_stop_string_over_tokens_is_never_shown(kind: str) -> None:
    detokenizer = Detokenizer(TOKENIZERS[kind](), stop=["STOP"])
    parts = stream(detokenizer, [[i] for i in word_ids(kind, "Hel", "lo ST", "OP rest", "DEF")])
    assert parts == ["Hel", "lo ", "", "", ""]
    assert (detokenizer.stop_reason, detokenizer.num_tokens) == ("STOP", 3)


@both_kinds
@pytest.mark.parametrize(("include", "text"), [(False, ""), (True, "DE")])
def test_text_is_cut_inside_the_token_that_holds_the_stop_string(kind: str, include: bool, text: str) -> None:
    detokenizer = Detokenizer(TOKENIZERS[kind](), stop=["DE"], include_stop_str_in_output=include)
    assert "".join(stream(detokenizer, [word_ids(kind, "DEF", "ST")])) == text
    assert detokenizer.num_tokens == 1


@both_kinds
def test_held_back_beginning_of_a_stop_string_is_delivered_at_the_end(kind: str) -> None:
    detokenizer = Detokenizer(TOKENIZERS[kind](), stop=["STOP"])
    assert stream(detokenizer, [[i] for i in word_ids(kind, "Hel", "lo ST")]) == ["Hel", "lo ", "ST"]
    assert detokenizer.stop_reason is None
    assert detokenizer.finish() == ""


@both_kinds
def test_characters_over_many_tokens_arrive_whole(kind: str) -> None:
    ids = byte_ids(kind, EMOJI.encode())
    parts = stream(Detokenizer(TOKENIZERS[kind]()), [[i] for i in ids])
    assert "".join(parts) == EMOJI
    assert not any("\ufffd" in part for part in parts)


def test_byte_level_text_waits_for_no_later_token() -> None:
    detokenizer = Detokenizer(byte_level())
    assert [detokenizer.push([i]) for i in "a🌶b".encode()] == ["a", "", "", "", "🌶", "b"]


@both_kinds
def test_incomplete_character_at_the_end_becomes_what_decode_gives(kind: str) -> None:
    ids = word_ids(kind, "A xyz") + byte_ids(kind, "🌶".encode()[:3])
    parts = stream(Detokenizer(TOKENIZERS[kind]()), [[i] for i in ids])
    assert parts[0] == "A xyz"
    assert parts[1:-1] == ["", "", ""]
    assert parts[-1] == ("\ufffd" if kind == "byte_level" else "\ufffd" * 3)  # one a byte: SentencePiece's way
    assert "".join(parts) == TOKENIZERS[kind]().decode(ids)


@both_kinds
def test_ids_without_text_leave_their_neighbours_alone(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    odd = [-1, 10**9, tokenizer.backend.get_vocab_size() + 5, *tokenizer.special_ids]
    first, second = word_ids(kind, "Hel", "lo ST")
    ids = [*odd, first, *odd, second, *odd]
    assert "".join(stream(Detokenizer(tokenizer), [[i] for i in ids])) == "Hello ST"


@both_kinds
def test_stop_string_before_min_tokens_does_not_count(kind: str) -> None:
    hel, stop = word_ids(kind, "Hel", "DEF")
    detokenizer = Detokenizer(TOKENIZERS[kind](), stop=["DEF"], min_tokens=5)
    parts = stream(detokenizer, [[i] for i in (hel, stop, hel, hel, stop, hel)])
    assert "".join(parts) == "HelDEFHelHel"
    assert (detokenizer.stop_reason, detokenizer.num_tokens) == ("DEF", 5)


def test_stop_string_that_only_begins_before_min_tokens_counts() -> None:
    detokenizer = Detokenizer(byte_level(), stop=["STOP"], min_tokens=2)
    assert "".join(stream(detokenizer, [word_ids("byte_level", "ST", "OP")])) == ""
    assert detokenizer.num_tokens == 2


@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [(["EF", "DE"], "", "DE"), (["DEF", "DE"], "", "DEF"), (["DE", "DEF"], "", "DE"), (["x", "F"], "DE", "F")],
)
def test_earliest_stop_string_wins_then_the_first_listed(stop: list[str], text: str, reason: str) -> None:
    detokenizer = Detokenizer(byte_level(), stop=stop)
    assert detokenizer.push(word_ids("byte_level", "DEF")) == text
    assert detokenizer.stop_reason == reason


def test_pushes_after_the_stop_string_change_nothing() -> None:
    detokenizer = Detokenizer(byte_level(), stop=["ST"])
    ids = word_ids("byte_level", "Hel", "ST", "DEF")
    assert detokenizer.push(ids) == "Hel"
    assert (detokenizer.push(ids), detokenizer.finish()) == ("", "")
    assert (detokenizer.stop_reason, detokenizer.num_tokens) == ("ST", 2)


def test_newline_byte_token_ends_at_once() -> None:
    """Llama 2 writes a newline as a byte token, whose text is certain only after the next token."""
    detokenizer = Detokenizer(llama2_like(), stop=["\n"])
    ids = word_ids("llama2_like", "Hel") + byte_ids("llama2_like", b"\n") + word_ids("llama2_like", "DEF")
    assert [detokenizer.push([i]) for i in ids] == ["Hel", "", ""]
    assert (detokenizer.stop_reason, detokenizer.num_tokens) == ("\n", 2)


@pytest.mark.parametrize("run", ["bytes that never form a character", "tokens of no text", "spaces"])
def test_window_stays_short(run: str) -> None:
    tokenizer = llama2_like()
    longest = 0

    class Counting(SmallTokenizer):
        def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
            nonlocal longest
            longest = max(longest, len(ids))
            return super().decode(ids, skip_special_tokens)

    ids = {
        "bytes that never form a character": byte_ids("llama2_like", b"\xff" * 300),
        "tokens of no text": [tokenizer.id_of("</s>"), 10**6] * 150,
        "spaces": [tokenizer.id_of("▁")] * 300,
    }[run]
    detokenizer = Detokenizer(Counting(tokenizer.backend), stop=["STOP"])
    for token_id in ids:
        detokenizer.push([token_id])
    assert longest <= 3
