"""Token ids to text, token by token: what may be shown now, and where a stop string ends it.

Tokenizers of byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM2) say which bytes each token stands for, so the text is
a table lookup and an incremental UTF-8 decoder: constant work a token. Others (SentencePiece kinds) decode a short
window of ids, whose beginning is known text, and show what came after it: the prefix and read offsets of
text-generation-inference and vLLM.
"""

from codecs import getincrementaldecoder, utf_8_decode
from collections.abc import Sequence

from engine.text.tokenizer import Tokenizer


class Detokenizer:
    """Incremental text of one request.

    What `push` and `finish` return, joined, is `tokenizer.decode` of all ids that were pushed, however they were
    split, cut at the first stop string. A character whose bytes are not all there, and text that could be the
    beginning of a stop string, is held back until it is certain; `finish` delivers what was.

    A stop string counts at the token that completes it, from token number `min_tokens` on. If one token completes
    several, the one that begins first is taken, and of those the first listed.

    stop_reason: the stop string that was found; pushes after it change nothing.
    num_tokens: tokens pushed, up to and with the one that completed the stop string.
    """

    __slots__ = ("_first_chars", "_held", "_include_stop", "_min_tokens", "_source", "_stops", "num_tokens",
                 "stop_reason")  # fmt: skip

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None:
        table = tokenizer.token_bytes
        hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._source = _WindowText(tokenizer, hidden) if table is None else _ByteText(table, hidden)
        self._stops = (stop,) if isinstance(stop, str) else tuple(stop)
        self._first_chars = frozenset(s[0] for s in self._stops)
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._held = ""
        self.num_tokens = 0
        self.stop_reason: str | None = None

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens; returns the text that may be shown now."""
        if self.stop_reason is not None:
            return ""
        if not self._stops:
            self.num_tokens += len(token_ids)
            return self._source.feed(token_ids)
        shown = []
        for token_id in token_ids:
            self.num_tokens += 1
            seen = len(self._held) + len(self._source.tentative)
            self._held += self._source.feed((token_id,))
            shown.append(self._release(seen))
            if self.stop_reason is not None:
                break
        return "".join(shown)

    def finish(self) -> str:
        """No more tokens come; returns the text that was held back."""
        if self.stop_reason is not None:
            return ""
        seen = len(self._held) + len(self._source.tentative)
        self._held += self._source.flush()
        shown = self._release(seen)
        rest, self._held = self._held, ""
        return shown + rest

    def _release(self, seen: int) -> str:
        """Take from the held text what no stop string can touch, or all before the stop string that just ended.

        seen: characters of the held and tentative text that earlier tokens made; a stop string that ended in
            those did not count then and does not now.
        """
        text, tentative = self._held, self._source.tentative
        if not tentative and self._first_chars.isdisjoint(text):
            self._held = ""
            return text
        if self.num_tokens >= self._min_tokens and (found := self._find_stop(text + tentative, seen)):
            start, stop = found
            self.stop_reason = stop
            self._held = ""
            return (text + tentative)[: start + len(stop) if self._include_stop else start]
        cut = len(text) - self._stop_prefix_length(text)
        self._held = text[cut:]
        return text[:cut]

    def _find_stop(self, text: str, seen: int) -> tuple[int, str] | None:
        """The first stop string of `text` that ends after `seen`, and where it begins."""
        best: tuple[int, str] | None = None
        for stop in self._stops:
            start = text.find(stop, max(0, seen - len(stop) + 1))
            if start >= 0 and (best is None or start < best[0]):
                best = start, stop
        return best

    def _stop_prefix_length(self, text: str) -> int:
        """Length of the longest end of `text` with which a stop string begins."""
        longest = 0
        for stop in self._stops:
            start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while start >= 0:
                if stop.startswith(text[start:]):
                    longest = max(longest, len(text) - start)
                    break
                start = text.find(stop[0], start + 1)
        return longest


class _ByteText:
    """Text of a byte-level tokenizer. Python replaces invalid UTF-8 as Rust's `from_utf8_lossy` does, which
    `tokenizers` decodes with: one U+FFFD for each maximal part of a character."""

    __slots__ = ("_hidden", "_pending", "_table")

    tentative = ""

    def __init__(self, table: list[bytes | None], hidden: frozenset[int]) -> None:
        self._table = table
        self._hidden = hidden
        self._pending = b""

    def feed(self, token_ids: Sequence[int]) -> str:
        table, hidden = self._table, self._hidden
        pieces = [table[i] or b"" for i in token_ids if i not in hidden and 0 <= i < len(table)]
        data = self._pending + b"".join(pieces)
        text, used = utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text

    def flush(self) -> str:
        data, self._pending = self._pending, b""
        return utf_8_decode(data, "replace", True)[0]


class _WindowText:
    """Text of any other tokenizer, from `decode` over a window of ids.

    The window begins with ids whose text is known and not empty, so that what a decoder does to the beginning of
    a text (drop one space) falls in the known part. Byte tokens (`<0xE4>`) stay back until another kind follows:
    decoders turn a whole run of them into U+FFFD if any byte of it is wrong. Until then `tentative` is the run's
    text so far, in which stop strings are found at once.
    """

    __slots__ = ("_hidden", "_id_to_token", "_known", "_run", "_tokenizer", "_utf8", "_valid", "_window", "tentative")

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._id_to_token = tokenizer.hf.backend_tokenizer.id_to_token
        self._hidden = hidden
        self._window: list[int] = []
        self._known = ""  # the window's text
        self._run: list[int] = []
        self._utf8 = getincrementaldecoder("utf-8")("strict")
        self._valid = True
        self.tentative = ""

    def feed(self, token_ids: Sequence[int]) -> str:
        shown = []
        for token_id in token_ids:
            token = None if token_id < 0 or token_id in self._hidden else self._id_to_token(token_id)
            if token is None:
                continue  # `decode` leaves it out before it looks at anything else
            value = self._byte_value(token_id, token)
            if value is None:
                shown.append(self._feed_piece(token_id))
            else:
                self._feed_byte(token_id, value)
        return "".join(shown)

    def flush(self) -> str:
        window = self._window + self._run
        return self._take(window, self._decode(window))

    def _feed_piece(self, token_id: int) -> str:
        window = [*self._window, *self._run, token_id]
        text = self._decode(window)
        if not self._run and self._known and text == self._known:
            return ""  # a token of no text; the window must not grow by it
        shown = self._take(window, text)
        for length in range(1, len(window)):  # the shortest end of the window that has text
            if text := self._decode(window[-length:]):
                self._window, self._known = window[-length:], text
                break
        return shown

    def _feed_byte(self, token_id: int, value: int) -> None:
        self._run.append(token_id)
        if not self._valid:
            return
        try:
            text = self._utf8.decode(bytes((value,)))
        except UnicodeDecodeError:
            self._valid, self.tentative = False, ""
            return
        if text and len(self._run) == 1:  # a space that begins the whole text may be dropped
            text = self._decode(self._window + self._run)[len(self._known) :]
        self.tentative += text

    def _take(self, window: list[int], text: str) -> str:
        """What `text`, that of `window`, has after the known part; `window` becomes the known part."""
        shown = text[len(self._known) :]
        self._window, self._known, self._run = window, text, []
        self._utf8.reset()
        self._valid, self.tentative = True, ""
        return shown

    def _byte_value(self, token_id: int, token: str) -> int | None:
        """The byte that a byte token stands for; None for other tokens, and if the decoder makes no byte of it."""
        if len(token) != 6 or not token.startswith("<0x") or token[5] != ">":
            return None
        try:
            value = int(token[3:5], 16)
        except ValueError:
            return None
        alone = self._decode([*self._window, token_id])[len(self._known) :]
        return None if alone == token else value

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)  # those to skip are not in any window
