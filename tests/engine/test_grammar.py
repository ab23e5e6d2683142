"""Outputs under a grammar: what random models write, what may come next, resumption, cache, faults."""

import json
import re
import threading
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from engine.errors import ConfigError, InvalidRequestError
from engine.structured import grammar as grammar_module
from engine.structured.grammar import GrammarCompiler, Matcher, bitmask_width, fill_masks
from engine.structured.spec import WHITESPACE, StructuredOutputSpec
from engine.structured.vocabulary import Vocabulary, grammar_vocabulary
from engine.text.tokenizer import Tokenizer
from kernels.bitmask import apply_bitmask
from tests import tiny_models
from tests.engine.schema_cases import CASES, SchemaCase
from tests.engine.test_structured_output import PATHOLOGICAL, decided
from tests.tiny_models import BOS_ID, EOS_ID, VOCAB_SIZE

PADDED = VOCAB_SIZE + 16
"""Logits of the pretended model: more than there are tokens."""


@cache
def vocabulary() -> Vocabulary:
    return grammar_vocabulary(Tokenizer(tiny_models.tokenizer(), (EOS_ID,)), PADDED)


@pytest.fixture(scope="module")
def compiler():
    compiler = GrammarCompiler(vocabulary)
    yield compiler
    compiler.close()


def spec_of(schema: object) -> StructuredOutputSpec:
    return StructuredOutputSpec(json_schema=json.dumps(schema))


def matcher(compiler: GrammarCompiler, spec: StructuredOutputSpec) -> Matcher:
    return compiler.compile(spec).result(60).matcher()


def ids_of(text: str | bytes) -> list[int]:
    """The longest tokens first: a spelling that the tokenizer need not share."""
    data, table, ids = text if isinstance(text, bytes) else text.encode(), vocabulary().tokens, []
    longest = max(map(len, table))
    while data:
        for size in range(min(longest, len(data)), 0, -1):
            if data[:size] in table[3:]:
                ids.append(table.index(data[:size], 3))
                data = data[size:]
                break
    return ids


def accepts(compiler: GrammarCompiler, spec: StructuredOutputSpec, text: str) -> bool:
    current = matcher(compiler, spec)
    return current.accept_many(ids_of(text)) and current.accept(EOS_ID)


def allowed(current: Matcher) -> list[int]:
    row = np.zeros(bitmask_width(PADDED), np.int32)
    assert current.fill_mask(row), current.error
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


def closing_bias() -> torch.Tensor:
    """A model that is random, but likes to close what is open, so that tests end."""
    bias = torch.zeros(PADDED)
    for i, data in enumerate(vocabulary().tokens):
        bias[i] = 3.0 if data and data in b'"}]' else 0.0
    return bias


def write(current: Matcher, seed: int, bias: torch.Tensor, max_tokens: int = 400) -> tuple[list[int], str]:
    """Sample under the mask until the output ends. Returns its tokens, and its text without EOS."""
    generator = torch.Generator().manual_seed(seed)
    row = np.zeros((1, bitmask_width(PADDED)), np.int32)
    ids: list[int] = []
    while not current.is_terminated and len(ids) < max_tokens:
        assert current.fill_mask(row[0])
        logits = torch.randn(1, PADDED, generator=generator) + bias
        apply_bitmask(logits, torch.from_numpy(row))
        ids.append(int(torch.multinomial(logits.softmax(-1), 1, generator=generator)))
        assert current.accept(ids[-1]), current.error
    data = b"".join(vocabulary().tokens[i] for i in ids if i != EOS_ID)
    return ids, data.decode("utf-8", "strict" if current.is_terminated else "replace")


POINT = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "x": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "x"],
    "additionalProperties": False,
}


def is_point(text: str) -> bool:
    value = json.loads(text)
    return list(value) == ["name", "x"] and len(value["name"]) <= 12 and value["x"] in range(100)


WRITTEN: dict[str, tuple[StructuredOutputSpec, Callable[[str], bool]]] = {
    "json_object": (StructuredOutputSpec(json_object=True), lambda text: isinstance(json.loads(text), dict)),
    "an object": (spec_of(POINT), is_point),
    "a list": (
        spec_of({"type": "array", "items": POINT, "minItems": 1, "maxItems": 2}),
        lambda text: len(json.loads(text)) in (1, 2) and all(is_point(json.dumps(v)) for v in json.loads(text)),
    ),
    "an enum": (spec_of({"enum": ["é", "漢🙂", 1, None]}), lambda text: json.loads(text) in ("é", "漢🙂", 1, None)),
    "a date": (
        spec_of({"type": "string", "format": "date"}),
        lambda text: re.fullmatch(r'"\d{4}-\d\d-\d\d"', text) is not None,
    ),
    "a tree": (
        spec_of({"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False}),
        lambda text: set(json.loads(text)) <= {"next"},
    ),
    "without whitespace": (
        StructuredOutputSpec(json_schema=json.dumps(POINT), disable_any_whitespace=True),
        lambda text: text == json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False) or "\\" in text,
    ),
    "regex": (
        StructuredOutputSpec(regex=r"[a-c]{2}/\d+é"),
        lambda text: re.fullmatch(r"[a-c]{2}/\d+é", text) is not None,
    ),
    "choice": (
        StructuredOutputSpec(choice=("yes", "yes, but", 'no "\\\n', "漢🙂")),
        lambda text: text in ("yes", "yes, but", 'no "\\\n', "漢🙂"),
    ),
    "lark": (
        StructuredOutputSpec(grammar='start: sum\nsum: term ("+" term)*\nterm: /[0-9]{1,3}/ | "(" sum ")"'),
        lambda text: isinstance(eval(re.sub(r"\b0+(\d)", r"\1", text)), int),
    ),
    "ebnf": (
        StructuredOutputSpec(grammar='root ::= "[" item ("," item)* "]"\nitem ::= [a-z]{2}'),
        lambda text: re.fullmatch(r"\[[a-z]{2}(,[a-z]{2})*\]", text) is not None,
    ),
    "json in lark": (
        StructuredOutputSpec(grammar=f'start: "<call>" %json {json.dumps(POINT)} "</call>"'),
        lambda text: text.startswith("<call>") and text.endswith("</call>") and is_point(text[6:-7]),
    ),
}


@pytest.mark.parametrize(("spec", "fits"), WRITTEN.values(), ids=WRITTEN.keys())
def test_what_a_random_model_writes_fits_wherever_it_ends(compiler, spec, fits):
    bias, ended = closing_bias(), 0
    for seed in range(12):
        current = matcher(compiler, spec)
        _, text = write(current, seed, bias)
        if current.is_terminated:
            ended += 1
            assert fits(text), text
    assert ended >= 6


@pytest.mark.parametrize("name", ["json_object", "an object", "a list", "a tree", "json in lark"])
def test_whitespace_runs_are_bounded_in_an_output_that_loves_them(compiler, name):
    bias = closing_bias()
    for i, data in enumerate(vocabulary().tokens):
        if data.isspace():
            bias[i] = 30.0
    _, text = write(matcher(compiler, WRITTEN[name][0]), 1, bias, 600)
    runs = re.findall(r"\s+", re.sub(r'"(\\.|[^"\\])*("|$)', "S", text))
    assert runs
    assert all(re.fullmatch(WHITESPACE, run) for run in runs)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_schemas_hold_what_they_say_or_are_refused(compiler, case: SchemaCase):
    spec = spec_of(case.schema)
    if case.name in REFUSED:
        with pytest.raises(InvalidRequestError, match="Structured output, json_schema: "):
            compiler.compile(spec).result(60)
        return
    for value in case.valid:
        for separators in ((",", ":"), (", ", ": ")):
            text = json.dumps(value, ensure_ascii=False, separators=separators)
            assert accepts(compiler, spec, text), text
    for value in case.invalid:
        assert not accepts(compiler, spec, json.dumps(value, ensure_ascii=False)), value


REFUSED = {
    "const beyond 2**53", "propertyNames", "dependentRequired", "unevaluatedProperties", "uniqueItems", "contains",
    "pattern with lookahead", "pattern with backreference", "format regex", "unknown format", "oneOf that overlap",
    "not", "if then else", "remote $ref",
}  # fmt: skip


def test_eos_may_come_only_when_the_output_is_complete_and_then_alone(compiler):
    current = matcher(compiler, StructuredOutputSpec(regex="ab+"))
    assert EOS_ID not in allowed(current)
    assert current.accept_many(ids_of("ab"))
    assert EOS_ID in allowed(current)
    assert not current.is_terminated
    assert current.accept(EOS_ID)
    assert current.is_terminated
    assert allowed(current) == [EOS_ID]


def test_an_output_that_nothing_can_follow_has_ended_before_eos(compiler):
    current = matcher(compiler, spec_of({"const": {"a": 1}}))
    assert current.accept_many(ids_of('{"a":1'))
    assert not current.is_terminated
    assert current.accept_many(ids_of("}"))
    assert current.is_terminated
    assert allowed(current) == [EOS_ID]
    assert current.accept(EOS_ID)


def test_ids_without_a_token_and_special_tokens_never_come(compiler):
    current = matcher(compiler, spec_of({"type": "string"}))
    assert current.accept_many(ids_of('"'))
    ids = set(allowed(current))
    assert ids.isdisjoint({0, BOS_ID, EOS_ID, *range(VOCAB_SIZE, PADDED)})
    assert len(ids) > 200
    assert current.accept_many(ids_of("<|im_end|>"))  # its text is only text


def test_a_grammar_may_ask_for_a_special_token(compiler):
    current = matcher(compiler, StructuredOutputSpec(grammar='start: <|im_start|> "a"'))
    assert allowed(current) == [BOS_ID]
    assert current.accept_many([BOS_ID, *ids_of("a")])
    with pytest.raises(InvalidRequestError, match="no_such_token"):
        matcher(compiler, StructuredOutputSpec(grammar="start: <|no_such_token|>"))


def test_a_character_may_be_split_over_tokens_and_stays_whole(compiler):
    table = vocabulary().tokens
    byte = {data: i for i, data in enumerate(table) if len(data) == 1}
    current = matcher(compiler, spec_of({"type": "string", "maxLength": 1}))
    assert current.accept_many([byte[b'"']])
    for i, value in enumerate("🙂".encode()):
        following = allowed(current)
        assert byte[bytes([value])] in following
        if i:
            assert all(table[j][0] in range(0x80, 0xC0) for j in following)
        assert current.accept(byte[bytes([value])])
    assert all(table[i][:1] == b'"' for i in allowed(current))
    assert current.accept(byte[b'"'])
    assert current.is_terminated


@pytest.mark.parametrize("name", WRITTEN)
def test_resumption_equals_going_on(compiler, name):
    spec = WRITTEN[name][0]
    ids, _ = write(matcher(compiler, spec), 3, closing_bias())
    for cut in {0, 1, len(ids) // 2, len(ids) - 1, len(ids)}:
        going, resumed = matcher(compiler, spec), matcher(compiler, spec)
        for token_id in ids[:cut]:
            allowed(going)
            assert going.accept(token_id)
        assert resumed.accept_many(np.array(ids[:cut], np.int32))
        assert resumed.is_terminated == going.is_terminated
        assert allowed(resumed) == allowed(going)


def test_a_token_that_does_not_fit_is_told_and_stays_told(compiler):
    current = matcher(compiler, StructuredOutputSpec(choice=("yes",)))
    assert current.error is None
    assert not current.accept_many(ids_of("no"))
    assert current.error
    assert not current.is_terminated
    assert not current.accept_many(ids_of("yes"))
    assert not current.fill_mask(np.zeros(bitmask_width(PADDED), np.int32))
    assert not matcher(compiler, StructuredOutputSpec(choice=("yes",))).accept(PADDED + 5)


@pytest.mark.parametrize("count", [1, 5, 100])
def test_masks_of_a_batch_equal_those_of_each(compiler, count):
    specs = [spec for spec, _ in WRITTEN.values()]
    batch, single = ([matcher(compiler, specs[i % len(specs)]) for i in range(count)] for _ in range(2))
    out = np.full((count + 2, bitmask_width(PADDED)), 7, np.int32)
    for _ in range(3):
        assert fill_masks(batch, out) == []
        for i in range(count):
            row = np.zeros(bitmask_width(PADDED), np.int32)
            single[i].fill_mask(row)
            assert (out[i] == row).all()
            token_id = allowed(single[i])[-1]
            assert batch[i].accept(token_id)
            assert single[i].accept(token_id)
    assert (out[count:] == 7).all()


def test_a_batch_names_the_matchers_in_an_error(compiler):
    batch = [matcher(compiler, StructuredOutputSpec(regex="a+")) for _ in range(3)]
    batch[1].accept(ids_of("b")[0])
    out = np.zeros((3, bitmask_width(PADDED)), np.int32)
    assert fill_masks(batch, out) == [1]
    assert (out[0] == out[2]).all()


@pytest.mark.parametrize(
    "out",
    [
        np.zeros((1, bitmask_width(PADDED)), np.int32),
        np.zeros((2, bitmask_width(PADDED) + 1), np.int32),
        np.zeros((2, bitmask_width(PADDED)), np.int64),
        np.zeros((2, 2 * bitmask_width(PADDED)), np.int32)[:, ::2],
    ],
)
def test_a_mask_array_that_does_not_fit_is_refused(compiler, out):
    batch = [matcher(compiler, StructuredOutputSpec(regex="a+")) for _ in range(2)]
    with pytest.raises(ValueError, match="out"):
        fill_masks(batch, out)


def test_a_grammar_that_grows_too_costly_ends_in_an_error_not_in_an_end(compiler):
    current = matcher(compiler, StructuredOutputSpec(regex=r"(\p{L}{1,100}){1,100}\d{1000}"))
    row = np.zeros(bitmask_width(PADDED), np.int32)
    letter = ids_of("e")[0]
    for _ in range(400):
        if not (current.fill_mask(row) and current.accept(letter)):
            break
    assert current.error
    assert not current.is_terminated


@pytest.mark.parametrize("spec", PATHOLOGICAL.values(), ids=PATHOLOGICAL.keys())
def test_compiling_and_following_the_pathological_is_bounded(compiler, spec):
    def work() -> None:
        try:
            current = matcher(compiler, spec)
        except InvalidRequestError:
            return
        rng = np.random.default_rng(0)
        row = np.zeros(bitmask_width(PADDED), np.int32)
        for _ in range(60):
            if not current.fill_mask(row) or current.is_terminated:
                return
            ids = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
            if not current.accept(int(rng.choice(ids))):
                return

    assert decided(work)


def test_grammars_are_kept_and_the_oldest_goes(monkeypatch):
    monkeypatch.setattr(grammar_module, "MAX_GRAMMARS", 2)
    compiler = GrammarCompiler(vocabulary)
    a, b, c = (StructuredOutputSpec(regex=letter) for letter in "abc")
    first = compiler.compile(a)
    assert compiler.compile(StructuredOutputSpec(regex="a")) is first
    compiler.compile(b)
    assert compiler.compile(a) is first  # so b is the oldest
    compiler.compile(c)
    assert compiler.compile(a) is first
    first.result(60).is_sound = False  # as when a matcher of it has failed
    again = compiler.compile(a)
    assert again is not first
    assert again.result(60).matcher().accept_many(ids_of("a"))
    compiler.close()


def test_what_cannot_be_compiled_raises_and_is_not_kept(compiler):
    spec = StructuredOutputSpec(regex="(")
    first = compiler.compile(spec)
    with pytest.raises(InvalidRequestError, match="unclosed group"):
        first.result(60)
    assert compiler.compile(spec) is not first


def test_compiling_too_long_is_given_up(monkeypatch):
    monkeypatch.setattr(grammar_module, "COMPILE_TIMEOUT_S", 0.05)
    gate = threading.Event()
    monkeypatch.setattr(grammar_module, "grammar_text", lambda spec: gate.wait(60) and 'start: "a"')
    compiler = GrammarCompiler(vocabulary)
    futures = [compiler.compile(StructuredOutputSpec(regex="a" * n)) for n in (1, 2, 3)]  # one more than threads
    for future in futures:
        with pytest.raises(InvalidRequestError, match=r"takes longer than 0.05 s"):
            future.result(60)
    gate.set()
    compiler.close()


def test_matchers_of_one_grammar_may_be_used_by_threads_at_once(compiler):
    grammar = compiler.compile(StructuredOutputSpec(json_object=True)).result(60)
    texts: list[str] = []

    def work(seed: int) -> None:
        current = grammar.matcher()
        _, text = write(current, seed, closing_bias(), 100)
        if current.is_terminated:
            texts.append(text)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts
    assert all(isinstance(json.loads(text), dict) for text in texts)


def sentencepiece(decoder: object) -> Tokenizer:
    pieces = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "a", '{"', "▁b", "b", "🙂"]
    backend = Backend(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True))
    backend.decoder = decoder
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>"), (1,))


def test_a_sentencepiece_vocabulary_has_bytes_too():
    decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = sentencepiece(decoder)
    assert tokenizer.token_bytes is None
    found = grammar_vocabulary(tokenizer, tokenizer.vocab_size)
    assert found.eos_ids == (1,)
    assert found.special_ids == {0, 1}
    assert found.tokens[2:258] == [bytes([byte]) for byte in range(256)]
    assert found.tokens[258:] == [b" ", b" a", b"a", b'{"', b" b", b"b", "🙂".encode()]
    compiler = GrammarCompiler(lambda: found)
    current = compiler.compile(StructuredOutputSpec(choice=("a b🙂",))).result(60).matcher()
    assert current.accept_many([260, 262, *(2 + byte for byte in "🙂".encode())])
    assert current.is_terminated
    compiler.close()


def test_a_vocabulary_whose_tokens_change_with_their_neighbours_is_refused():
    tokenizer = sentencepiece(decoders.CTC(pad_token="<s>", word_delimiter_token="▁"))  # it merges equal neighbours
    with pytest.raises(ConfigError, match="same bytes wherever they are"):
        grammar_vocabulary(tokenizer, tokenizer.vocab_size)


def test_a_model_without_eos_is_refused():
    tokenizer = sentencepiece(decoders.Fuse())
    tokenizer.eos_token_ids = ()
    with pytest.raises(ConfigError, match="EOS"):
        grammar_vocabulary(tokenizer, tokenizer.vocab_size)
