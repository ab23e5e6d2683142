"""Text to token ids and back: a thin wrapper over transformers' fast tokenizers."""

import inspect
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers.normalizers import NFC

from engine.errors import ConfigError, InvalidRequestError
from engine.model_config import configured_eos_token_ids, is_gguf

_NFC_SHRINKS = 4
"""Characters that NFC may make one of: a letter with three marks is the longest sequence that has a form of its own."""

_TOKENIZER_FILES = ("tokenizer*", "*.model", "vocab*", "*.tiktoken", "tekken.json")
"""Names of the files that any kind of tokenizer is kept in, as patterns."""


class Tokenizer:
    """One model's tokenizer; what it answers is what transformers' own, which it holds as `hf`, would.

    vocab_size: ids there are, with added tokens; the model's own vocabulary may be padded beyond it.
    eos_token_ids: the model's, which may be more than the tokenizer's one.
    special_ids: ids whose text `decode` leaves out.
    chat_template: the default template, or None when the model has none.
    """

    def __init__(self, hf: Any, eos_token_ids: Sequence[int]) -> None:
        self.hf = hf
        # A saved tokenizer may carry truncation and padding, which would cut prompts silently.
        hf.backend_tokenizer.no_truncation()
        hf.backend_tokenizer.no_padding()
        own = () if hf.eos_token_id is None else (hf.eos_token_id,)
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys((*eos_token_ids, *own)))
        self.bos_token_id: int | None = hf.bos_token_id
        self.vocab_size: int = len(hf)
        added = hf.added_tokens_decoder
        self.special_ids = frozenset(hf.all_special_ids) | {i for i, token in added.items() if token.special}
        # Names that transformers would take as its own arguments and not hand on to the template.
        self._reserved = set(inspect.signature(hf.apply_chat_template).parameters) - {"kwargs", "documents"}
        template = hf.chat_template
        self.chat_template: str | None = template.get("default") if isinstance(template, dict) else template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self.hf.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        text: str = self.hf.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
        return text

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> list[int]:
        """Format a chat (see `format_chat`) and tokenise it; BOS is there only if the template writes it."""
        text = self.format_chat(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **kwargs,
        )
        return self.encode(text, add_special_tokens=False)

    def format_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """Format a chat by the model's template.

        kwargs: further variables of the template. Raises `InvalidRequestError` with the template's own message, or
        when the model has no template.
        """
        if not self.hf.chat_template:
            raise InvalidRequestError(
                "This model has no chat template, so it takes no messages: send a prompt instead.", "messages"
            )
        if taken := sorted(set(kwargs) & self._reserved):
            raise InvalidRequestError(f"The chat template has no variable {', '.join(taken)}.", "chat_template_kwargs")
        try:
            text: str = self.hf.apply_chat_template(
                messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=False,
                **kwargs,
            )
        except Exception as error:  # a template is a program of its own: it raises what it likes
            raise InvalidRequestError(f"The chat template refused the messages: {error}", "messages") from error
        return text

    def fewest_tokens(self, text: str) -> int:
        """Tokens that `text` has at the least, told from its length alone; 0 where that tells nothing.

        For refusing what is far too long before time and memory go into tokenising it.
        """
        return len(text) // self._most_characters if self._most_characters else 0

    @cached_property
    def _most_characters(self) -> int:
        """Characters of text that one token can stand for; 0 if there is no such bound."""
        backend = self.hf.backend_tokenizer
        strips = any(token.lstrip or token.rstrip for token in self.hf.added_tokens_decoder.values())
        if (
            self.token_bytes is None
            or strips
            or not (backend.normalizer is None or isinstance(backend.normalizer, NFC))
        ):
            return 0
        longest = max(len(token) for token in self.token_bytes if token)
        return longest if backend.normalizer is None else longest * _NFC_SHRINKS

    @cached_property
    def token_bytes(self) -> list[bytes | None] | None:
        """The bytes that each id stands for, and None for an id without a token; a special token gives its text.

        The whole result is None when the tokenizer is not byte-level BPE. Made once: it walks the vocabulary.
        """
        from tokenizers import decoders

        if not isinstance(self.hf.backend_tokenizer.decoder, decoders.ByteLevel):
            return None
        byte_of = _byte_of_character()
        vocab = self.hf.get_vocab()
        table: list[bytes | None] = [None] * max(self.vocab_size, max(vocab.values()) + 1)
        for token, token_id in vocab.items():
            # The decoder reads every token in its alphabet, added ones too, and takes the rest as plain text.
            if all(character in byte_of for character in token):
                table[token_id] = bytes([byte_of[character] for character in token])
            else:
                table[token_id] = token.encode()
        return table


def load_tokenizer(path: Path, trust_remote_code: bool = False) -> Tokenizer:
    """Load the tokenizer of a folder in Hugging Face layout or of a `.gguf` file, without the network.

    Raises `ConfigError` that names the path.
    """
    path = Path(path)
    if is_gguf(path):
        return _from_gguf(path)
    # Of some families transformers makes an empty tokenizer when there are no files, and every text would be "".
    if path.is_dir() and not trust_remote_code and not any(next(path.glob(p), None) for p in _TOKENIZER_FILES):
        raise ConfigError(
            f"{path} has no tokenizer: put the model's tokenizer.json there, and tokenizer_config.json beside it"
        )
    try:
        if (path / "tokenizer.json").is_file() and not trust_remote_code:
            # The whole tokenizer is in that file; AutoTokenizer would import torch to find a class for it.
            from transformers import PreTrainedTokenizerFast

            hf = PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
        else:
            from transformers import AutoTokenizer

            hf = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # transformers raises many kinds for a file that is missing or wrong
        raise ConfigError(f"{path} has no tokenizer that can be loaded ({type(error).__name__}: {error})") from error
    if not hf.is_fast:
        raise ConfigError(f"{path} has no fast tokenizer: convert it to a tokenizer.json first")
    return Tokenizer(hf, configured_eos_token_ids(path))


def _from_gguf(path: Path) -> Tokenizer:
    from engine.gguf.config import eos_token_ids
    from engine.gguf.file import open_gguf

    file = open_gguf(path)
    from transformers import PreTrainedTokenizerFast

    from engine.gguf.tokenizer import build_tokenizer

    backend, settings = build_tokenizer(file)
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, **settings), eos_token_ids(file))


def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: a printable byte is its own character, the others are U+0100 onward, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
