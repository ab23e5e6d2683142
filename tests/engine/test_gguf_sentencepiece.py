"""The SentencePiece tokenizer of a GGUF file against the algorithm as it is defined."""

import itertools
import random
from pathlib import Path

import gguf
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, trainers

from engine.errors import ConfigError
from engine.text.tokenizer import Tokenizer, load_tokenizer
from tests import tiny_models
from tests.tiny_gguf import write_gguf

CORPUS = [
    "The quick brown fox jumps over the lazy dog. She sells sea shells by the sea shore, and he reads the book again.",
    "In the beginning there was a small model that could count: one, two, three, four, five, 1, 2, 3, 10, 42, 1999.",
    "there is a there there, and then the others were theirs; naive, naïve, über, Straße, the shore of the sea",
]
TEXTS = [
    "",
    " ",
    "the",
    "the sea shore",
    "  two  spaces",
    "naïve 日本 über",
    "a\n\tb",
    "<s>there</s> is",
    "Ελλάς 42 one, two",
]


def pieces() -> list[tuple[str, float, gguf.TokenType]]:
    """Special tokens, bytes, characters and what merging makes of them, the score falling from merge to merge."""
    backend = Backend(models.BPE())
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=160, show_progress=False))
    normal = sorted(backend.get_vocab().items(), key=lambda item: item[1])
    kinds = gguf.TokenType
    special = [("<unk>", 0.0, kinds.UNKNOWN), ("<s>", 0.0, kinds.CONTROL), ("</s>", 0.0, kinds.CONTROL)]
    raw = [(f"<0x{byte:02X}>", 0.0, kinds.BYTE) for byte in range(256)]
    return special + raw + [(piece, -float(i), kinds.NORMAL) for i, (piece, _) in enumerate(normal)]


def defined(text: str) -> list[int]:
    """Join the two neighbours whose piece has the best score, the leftmost of equals, until none is left."""
    scores = {piece: score for piece, score, kind in pieces() if kind is gguf.TokenType.NORMAL}
    ids = {piece: i for i, (piece, _, _) in enumerate(pieces())}
    parts = list(text.replace(" ", "▁"))
    while True:
        pairs = [(-scores[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in scores]
        if not pairs:
            break
        _, i = min(pairs)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    found = []
    for part in parts:
        found += [ids[part]] if part in scores else [ids[f"<0x{byte:02X}>"] for byte in part.encode()]
    return found


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    root = tmp_path_factory.mktemp("model")
    return load_tokenizer(write_gguf(tiny_models.llama(root), root / "m.gguf", pieces=pieces(), add_bos=None))


def test_texts_become_the_pieces_that_the_definition_gives(tokenizer: Tokenizer) -> None:
    generator = random.Random(0)
    alphabet = "".join(CORPUS) + "日本é"
    texts = ["".join(generator.choices(alphabet, k=30)) for _ in range(200)]
    for text in [*CORPUS, *TEXTS[:7], TEXTS[8], *texts]:
        expected = defined(" " + text) if text else []
        assert tokenizer.encode(text, add_special_tokens=False) == expected, text


def test_bos_comes_first_and_special_tokens_are_one_token(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("the") == [1, *tokenizer.encode("the", add_special_tokens=False)]
    ids = tokenizer.encode("<s>there</s> is", add_special_tokens=False)
    assert ids[0] == 1
    assert ids.count(2) == 1
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.special_ids) == (1, (2,), frozenset({0, 1, 2}))


@pytest.mark.parametrize("text", [text for text in TEXTS if "<s>" not in text])
def test_texts_come_back(text: str, tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_no_space_is_put_before_where_the_file_says_so(tmp_path: Path) -> None:
    folder = tiny_models.llama(tmp_path / "folder")
    file = write_gguf(
        folder, tmp_path / "m.gguf", pieces=pieces(), metadata={"tokenizer.ggml.add_space_prefix": False}, add_bos=False
    )
    tokenizer = load_tokenizer(file)
    assert tokenizer.encode("the sea") == defined("the sea")
    assert tokenizer.decode(tokenizer.encode("the sea")) == "the sea"


def test_a_tokenizer_of_another_kind_is_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tokenizer_model("t5")
    writer.add_token_list(["a"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=r"kind .t5. is not supported from GGUF.*SentencePiece"):
        load_tokenizer(tmp_path / "m.gguf")
