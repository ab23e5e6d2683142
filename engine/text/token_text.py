"""The text and the bytes of single tokens, as entries of log probabilities show them."""

from dataclasses import dataclass

from engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TokenText:
    r"""text: what the token reads; if it is no whole characters, its bytes as in OpenAI's API: `bytes:\xf0\x9f`, so
    that different tokens read differently.
    data: the bytes of the text that it makes; None if it makes none: a special token that is left out, or an id
        without a token.
    """

    text: str
    data: bytes | None


class TokenTexts:
    """Entries for a model's tokens. The `data` of an output's tokens, joined, decodes to its text (`errors="replace"`),
    wherever characters are split.

    skip_special_tokens: as for the text.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._known: dict[tuple[int, bool], TokenText] = {}

    def entry(self, token_id: int, first: bool = False) -> TokenText:
        """first: whether the token begins the text, where some tokenizers drop a space."""
        key = token_id, first
        if (known := self._known.get(key)) is None:
            known = self._known[key] = self._make(token_id, first)
        return known

    def _make(self, token_id: int, first: bool) -> TokenText:
        backend = self._tokenizer.hf.backend_tokenizer
        token: str | None = backend.id_to_token(token_id)
        if token is None:
            return TokenText("", None)
        if token_id in self._hidden:
            return TokenText(token, None)
        table = self._tokenizer.token_bytes
        data = self._decoded(token_id, token, first) if table is None else table[token_id] or b""
        try:
            text = data.decode()
        except UnicodeDecodeError:
            text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
        return TokenText(text, data)

    def _decoded(self, token_id: int, token: str, first: bool) -> bytes:
        """What the token adds to a text, for a tokenizer that is not byte-level."""
        alone = self._tokenizer.decode([token_id], skip_special_tokens=False)
        if len(token) == 6 and token.startswith("<0x") and alone != token:  # a byte: half a character decodes to U+FFFD
            return bytes([int(token[3:5], 16)])
        if first:
            return alone.encode()
        return self._tokenizer.decode([token_id] * 2, skip_special_tokens=False)[len(alone) :].encode()
