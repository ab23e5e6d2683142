"""Entries of single tokens: their bytes, joined, are the text."""

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from engine.text.token_text import TokenText, TokenTexts
from engine.text.tokenizer import Tokenizer
from tests import tiny_models

TEXTS = ["ok 🌶 世界 done", "The quick brown fox", "naïve\n\ttabs  and spaces", "🌶", "a\u0301"]


def byte_level() -> Tokenizer:
    return Tokenizer(tiny_models.tokenizer(), eos_token_ids=(tiny_models.EOS_ID,))


def sentencepiece() -> Tokenizer:
    """A Llama-2 kind: pieces with U+2581 for a space, byte tokens, and a decoder that drops the first space."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{i:02X}>" for i in range(256)),
        "▁ok",
        "▁",
        "▁done",
        "The",
        "▁quick",
        "ick",
    ]
    backend = Backend(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", bos_token="<s>", unk_token="<unk>")
    return Tokenizer(hf, eos_token_ids=(2,))


def joined(texts: TokenTexts, ids: list[int]) -> str:
    entries = [texts.entry(token_id, first=i == 0) for i, token_id in enumerate(ids)]
    return b"".join(entry.data for entry in entries if entry.data is not None).decode(errors="replace")


@pytest.mark.parametrize("text", TEXTS)
def test_joined_bytes_are_the_text_of_a_byte_level_tokenizer(text: str) -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode(text)
    assert joined(TokenTexts(tokenizer), ids) == text


def test_joined_bytes_of_a_cut_character_are_the_decoded_text() -> None:
    tokenizer = byte_level()
    ids = [*tokenizer.encode("A xyz"), *tokenizer.encode("🌶")[:2]]
    assert joined(TokenTexts(tokenizer), ids) == tokenizer.decode(ids) == "A xyz\ufffd"


def test_parts_of_a_character_read_as_their_bytes() -> None:
    tokenizer = byte_level()
    entries = [TokenTexts(tokenizer).entry(token_id) for token_id in tokenizer.encode("🌶")]
    assert [entry.text for entry in entries] == [r"bytes:\xf0", r"bytes:\x9f", r"bytes:\x8c", r"bytes:\xb6"]


def test_special_tokens_read_as_they_are_written_and_make_text_where_it_has_them() -> None:
    tokenizer = byte_level()
    eos = tiny_models.EOS_ID
    assert TokenTexts(tokenizer).entry(eos) == TokenText("<|im_end|>", None)
    shown = TokenTexts(tokenizer, skip_special_tokens=False)
    assert shown.entry(eos) == TokenText("<|im_end|>", b"<|im_end|>")
    ids = [*tokenizer.encode("ab"), eos, *tokenizer.encode("c")]
    assert joined(TokenTexts(tokenizer), ids) == tokenizer.decode(ids) == "abc"
    assert joined(shown, ids) == tokenizer.decode(ids, skip_special_tokens=False)


def test_an_id_without_a_token_has_no_text() -> None:
    for tokenizer in (byte_level(), sentencepiece()):
        assert TokenTexts(tokenizer).entry(5000) == TokenText("", None)


def test_a_tokenizer_of_pieces_drops_the_first_space_only() -> None:
    tokenizer = sentencepiece()
    id_of = tokenizer.hf.get_vocab()
    pepper = [id_of[f"<0x{byte:02X}>"] for byte in "🌶".encode()]
    ids = [id_of["▁ok"], id_of["▁"], *pepper, id_of["▁done"], 2]
    assert joined(TokenTexts(tokenizer), ids) == tokenizer.decode(ids) == "ok 🌶 done"
    texts = TokenTexts(tokenizer)
    assert texts.entry(id_of["▁ok"]).text == " ok"
    assert texts.entry(id_of["▁ok"], first=True).text == "ok"
    assert texts.entry(pepper[0]).text == r"bytes:\xf0"
