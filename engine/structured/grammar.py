"""Grammars in the engine: compiled off the step thread, kept, and turned into masks of tokens that may come next."""

import functools
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import ConfigError, InvalidRequestError
from engine.structured.spec import StructuredOutputSpec, grammar_text, library_error, parser_limits, refusal
from engine.structured.vocabulary import Vocabulary

logger = logging.getLogger(__name__)

Bitmask = NDArray[np.int32]
"""[rows, bitmask_width(vocab)]: bit i % 32 of word i // 32 is set if token i may come next."""

MAX_GRAMMARS = 64
"""Compiled grammars that are kept; the least recently used goes first."""

COMPILE_TIMEOUT_S = 10.0
COMPILE_THREADS = 2

SERIAL_ROWS = 64
"""Masks of fewer rows are made in the calling thread: each takes microseconds, waking others takes longer."""


def bitmask_width(vocab_size: int) -> int:
    """Words of 32 bits for one row."""
    return -(-vocab_size // 32)


class Matcher:
    """How far one request's output has come in its grammar. For one thread at a time.

    A token that does not fit, or a grammar that gets too costly, puts it in an error for good: see `error`.
    """

    __slots__ = ("_grammar", "_matcher")

    def __init__(self, matcher: Any, grammar: "Grammar") -> None:
        self._matcher = matcher
        self._grammar = grammar

    @property
    def width(self) -> int:
        """Words of a mask."""
        return self._grammar.width

    def fill_mask(self, row: Bitmask) -> bool:
        """Write which tokens may come next to `row`: int32 [width], contiguous. EOS may where the output is complete,
        and alone where nothing else can follow.

        False if the matcher is in an error; the row then allows EOS alone, and the request must end with that error.
        """
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        return self._note_error()

    def _note_error(self) -> bool:
        """False if there is an error; what the grammar's matchers share may be what has grown too large."""
        if self._matcher.is_error():
            self._grammar.is_sound = False
            return False
        return True

    def accept(self, token_id: int) -> bool:
        """Go on by one token; False if it does not fit."""
        accepted: bool = self._matcher.consume_token(token_id)
        return accepted

    def accept_many(self, token_ids: Sequence[int]) -> bool:
        """Go on by tokens that came before (`output_ids`); False if one does not fit."""
        ids = [int(token_id) for token_id in token_ids]
        end = next((i for i, token_id in enumerate(ids) if token_id in self._grammar.eos_ids), len(ids))
        if end and not self._matcher.consume_tokens(ids[:end]):
            return False
        return all(self.accept(token_id) for token_id in ids[end:])

    @property
    def is_terminated(self) -> bool:
        """Whether the output is complete and nothing can follow: EOS has come, or no other token fits."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def error(self) -> str | None:
        return str(self._matcher.get_error()).split("\n")[0] if self._matcher.is_error() else None


class Grammar:
    """A compiled grammar; the matchers made from it share what it learns about the vocabulary.

    is_sound: false when a matcher has failed; such a grammar is compiled anew for the next request.
    """

    def __init__(self, matcher: Any, eos_ids: frozenset[int], width: int) -> None:
        self._fresh = matcher
        self.eos_ids = eos_ids
        self.width = width
        self.is_sound = True

    def matcher(self) -> Matcher:
        """A matcher at the beginning, in half a microsecond. Thread-safe."""
        return Matcher(self._fresh.deep_copy(), self)


def fill_masks(matchers: Sequence[Matcher], out: Bitmask) -> list[int]:
    """Row i of `out` becomes the mask of matcher i. Returns the indices of those in an error.

    matchers: of grammars of one vocabulary. out: int32 [len(matchers) or more, their width], contiguous.
    """
    width = matchers[0].width
    if out.dtype != np.int32 or out.ndim != 2 or out.shape[1] != width or not out.flags.c_contiguous:
        raise ValueError(f"out must be a contiguous int32 array [rows, {width}], got {out.dtype} {out.shape}")
    if len(out) < len(matchers):
        raise ValueError(f"out has {len(out)} rows for {len(matchers)} matchers")
    if len(matchers) > SERIAL_ROWS:
        pairs = [(matcher._matcher, i) for i, matcher in enumerate(matchers)]
        _executor().unsafe_compute_mask_ptr(pairs, out.ctypes.data, width * 4, len(out))
        return [i for i, matcher in enumerate(matchers) if not matcher._note_error()]
    return [i for i, matcher in enumerate(matchers) if not matcher.fill_mask(out[i])]


@functools.cache
def _executor() -> Any:
    from llguidance import LLExecutor

    return LLExecutor()


class GrammarCompiler:
    """Compiles specs for one vocabulary. Thread-safe. The vocabulary is read and the library loads for the first spec.

    read_vocabulary: may raise `ConfigError` where a model can have no structured output.
    """

    def __init__(self, read_vocabulary: Callable[[], Vocabulary]) -> None:
        self._vocabulary = functools.cache(read_vocabulary)
        self._grammars: OrderedDict[StructuredOutputSpec, Future[Grammar]] = OrderedDict()
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(COMPILE_THREADS, thread_name_prefix="grammar")
        self._tokenizer: Any = None
        self._tokenizer_lock = threading.Lock()

    def compile(self, spec: StructuredOutputSpec) -> Future[Grammar]:
        """The spec's grammar, from the cache or compiled in another thread.

        The future raises `InvalidRequestError` for what cannot be compiled, or not within `COMPILE_TIMEOUT_S`.
        """
        with self._lock:
            known = self._grammars.get(spec)
            if known is not None and (not known.done() or known.result().is_sound):  # one that failed is not kept
                self._grammars.move_to_end(spec)
                return known
            future: Future[Grammar] = Future()
            self._grammars[spec] = future
            if len(self._grammars) > MAX_GRAMMARS:
                self._grammars.popitem(last=False)
        timer = threading.Timer(COMPILE_TIMEOUT_S, self._settle, (spec, future, None))
        timer.daemon = True
        timer.start()
        future.add_done_callback(lambda _: timer.cancel())
        self._pool.submit(self._compile, spec, future)
        return future

    def close(self) -> None:
        """End the threads when they have done what they do; idempotent."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _compile(self, spec: StructuredOutputSpec, future: Future[Grammar]) -> None:
        if future.done():  # it has waited too long for a thread
            return
        try:
            from llguidance import LLMatcher

            tree, limits = self._vocabulary_tree(), parser_limits(spec.kind)
            matcher = LLMatcher(tree, grammar_text(spec), log_level=0, limits=limits)
            if matcher.is_error() or matcher.get_grammar_warnings():
                raise library_error(spec, matcher.get_error() or matcher.get_grammar_warnings()[0])
        except Exception as error:
            if isinstance(error, ConfigError):
                error = refusal(spec, str(error))
            elif not isinstance(error, InvalidRequestError):
                logger.exception("compiling structured output of kind %s failed", spec.kind)
            self._settle(spec, future, error)
        else:
            vocabulary = self._vocabulary()
            width = bitmask_width(len(vocabulary.tokens))
            self._settle(spec, future, Grammar(matcher, frozenset(vocabulary.eos_ids), width))

    def _settle(self, spec: StructuredOutputSpec, future: Future[Grammar], outcome: Grammar | Exception | None) -> None:
        try:
            if isinstance(outcome, Grammar):
                future.set_result(outcome)
                return
            late = refusal(spec, f"compiling it takes longer than {COMPILE_TIMEOUT_S:g} s")
            future.set_exception(late if outcome is None else outcome)
        except InvalidStateError:  # the other outcome came first
            return
        with self._lock:
            if self._grammars.get(spec) is future:
                del self._grammars[spec]

    def _vocabulary_tree(self) -> Any:
        with self._tokenizer_lock:
            if self._tokenizer is None:
                from llguidance import LLTokenizer

                vocabulary = self._vocabulary()
                wrapped: Any = _LibraryVocabulary(vocabulary)
                self._tokenizer = LLTokenizer(wrapped, eos_token=list(vocabulary.eos_ids))
            return self._tokenizer


class _LibraryVocabulary:
    """The vocabulary in the shape that the library reads."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = vocabulary.tokens
        self.eos_token_id = vocabulary.eos_ids[0]
        self.special_token_ids = sorted(vocabulary.special_ids | set(vocabulary.eos_ids))

    def __call__(self, text: str) -> list[int]:
        raise RuntimeError("the engine tokenises nothing: grammars are compiled with no_forcing")
