"""Log probabilities beside the text that they belong to."""

from codecs import utf_8_decode
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from engine.outputs import TokenLogprobs
from engine.text.token_text import TokenText, TokenTexts


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """One token as an answer shows it.

    logprob: None for the first token of a prompt, which nothing comes before.
    top: the most likely tokens in its place, falling; None with logprob.
    offset: characters of the text before it.
    """

    token_id: int
    token: TokenText
    logprob: float | None
    rank: int
    top: list[tuple[int, TokenText, float]] | None
    offset: int


class EntryAligner:
    """Gives each token's entry when the first of its text is shown, so that entries end where the text does.

    A token that is held back, and then cut off by a stop string, is never shown; one that is cut within is.
    """

    def __init__(self, texts: TokenTexts, offset: int = 0) -> None:
        self._texts = texts
        self._pending: deque[TokenEntry] = deque()
        self._bytes = b""  # of a character that is not complete
        self._made = offset  # characters, up to the next token
        self._shown = offset
        self._first = True

    def push(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> None:
        for token_id, given in zip(token_ids, logprobs, strict=True):
            token = self._texts.entry(token_id, self._first)
            self._first = False
            self._pending.append(self._entry(token_id, token, given))
            text, used = utf_8_decode(self._bytes + (token.data or b""), "replace", False)
            self._bytes = (self._bytes + (token.data or b""))[used:]
            self._made += len(text)

    def push_hidden(self, token_id: int) -> None:
        """A first token that has no text here."""
        token = TokenText(self._texts.entry(token_id, True).text, None)
        self._pending.append(self._entry(token_id, token, None))

    def show(self, text: str, *, end: bool = False, cut: bool = False) -> list[TokenEntry]:
        """Entries of what is shown now. end: it is the last. cut: a stop string has cut it off."""
        self._shown += len(text)
        shown = []
        while self._pending and (self._pending[0].offset < self._shown or (end and not cut)):
            shown.append(self._pending.popleft())
        return shown

    def _entry(self, token_id: int, token: TokenText, given: TokenLogprobs | None) -> TokenEntry:
        if given is None:
            return TokenEntry(token_id, token, None, 0, None, self._made)
        top = [
            (other, self._texts.entry(other, False), logprob)
            for other, logprob in zip(given.token_ids[1:], given.logprobs[1:], strict=True)
        ]
        return TokenEntry(token_id, token, given.logprobs[0], given.rank, top, self._made)


@dataclass(frozen=True, slots=True)
class PromptScorer:
    """Makes the entries of one prompt.

    num_top: most likely tokens to show. begins_with_added: whether the tokenizer put the first token there, which so is
    none of the prompt's text.
    """

    texts: TokenTexts
    prompt_ids: Sequence[int]
    num_top: int
    begins_with_added: bool

    def entries(self, logprobs: Sequence[TokenLogprobs | None]) -> list[TokenEntry]:
        """logprobs: one for each token, with as many of the most likely or more."""
        aligner = EntryAligner(self.texts)
        token_ids = self.prompt_ids
        if self.begins_with_added:
            aligner.push_hidden(token_ids[0])
            token_ids, logprobs = token_ids[1:], logprobs[1:]
        aligner.push(token_ids, [self._cut(given) for given in logprobs])
        return aligner.show("", end=True)

    def _cut(self, given: TokenLogprobs | None) -> TokenLogprobs | None:
        end = 1 + self.num_top
        if given is None or len(given.token_ids) <= end:
            return given
        return TokenLogprobs(given.token_ids[:end], given.logprobs[:end], given.rank)
