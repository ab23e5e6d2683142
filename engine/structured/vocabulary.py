"""The bytes that a vocabulary's tokens stand for: all that grammars need of a tokenizer."""

import random
from dataclasses import dataclass

from engine.errors import ConfigError
from engine.text.tokenizer import Tokenizer

_PROBES = 200


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """tokens: bytes of each id, as many as the model has logits; empty for an id that must never come.
    special_ids: ids that no text may be spelled with.
    eos_ids: ids that end an output, at least one.
    """

    tokens: list[bytes]
    special_ids: frozenset[int]
    eos_ids: tuple[int, ...]


def grammar_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> Vocabulary:
    """The vocabulary of a model with `vocab_size` logits, which may be more than the tokenizer has tokens.

    Raises `ConfigError` when the tokenizer's tokens have no bytes of their own (text that depends on what stands
    beside them, as in WordPiece), or when there is no EOS token: such a model has no structured output.
    """
    eos_ids = tuple(token_id for token_id in tokenizer.eos_token_ids if token_id < vocab_size)
    if not eos_ids:
        raise ConfigError("structured output needs a model with an EOS token, and this one names none")
    table = tokenizer.token_bytes
    tokens = [data or b"" for data in table] if table is not None else _decoded(tokenizer)
    tokens = (tokens + [b""] * (vocab_size - len(tokens)))[:vocab_size]
    special_ids = frozenset(token_id for token_id in tokenizer.special_ids if token_id < vocab_size)
    return Vocabulary(tokens, special_ids, eos_ids)


def _decoded(tokenizer: Tokenizer) -> list[bytes]:
    """Bytes of each token of a tokenizer that is not byte-level (SentencePiece): what it adds to a text."""
    backend = tokenizer.hf.backend_tokenizer
    ids = range(tokenizer.vocab_size)
    alone = backend.decode_batch([[i] for i in ids], skip_special_tokens=False)
    twice = backend.decode_batch([[i, i] for i in ids], skip_special_tokens=False)
    tokens, plain = [], []
    for i in ids:
        name = backend.id_to_token(i)
        if name is None:
            tokens.append(b"")
        elif len(name) == 6 and name.startswith("<0x") and name.endswith(">") and alone[i] != name:
            tokens.append(bytes([int(name[3:5], 16)]))
        else:
            tokens.append(twice[i][len(alone[i]) :].encode())
            if i not in tokenizer.special_ids:
                plain.append(i)
    # Whether tokens stand for the same bytes everywhere shows in a few random sequences.
    generator = random.Random(0)
    for _ in range(_PROBES if plain else 0):
        first, *rest = generator.choices(plain, k=4)
        text = backend.decode([first, *rest], skip_special_tokens=False)
        if text.encode() != alone[first].encode() + b"".join(tokens[i] for i in rest):
            raise ConfigError(
                "structured output needs a tokenizer whose tokens stand for the same bytes wherever they are "
                "(byte-level BPE, SentencePiece); this one's do not"
            )
    return tokens
