"""Structured output: what a request may demand of its output's form, and whether that can be held.

Text and checks only, for the ingress; `engine.structured.grammar` compiles what passes here and makes the token
masks. The grammar library (llguidance) loads when it is first needed.
"""

import functools
import json
import re
from dataclasses import dataclass
from typing import Any

from engine.errors import InvalidRequestError
from engine.structured.json_schema import check_schema, parse_schema

PARAM = "structured_outputs"

MAX_BYTES = 256 * 1024
"""Of a schema, regex, grammar or all choices together, in UTF-8."""

MAX_EBNF_RULES = 500
"""The converter of such grammars takes time in the square of their number."""

WHITESPACE = r"[ ]{1,2}|\r?\n[ \t]{0,32}"
"""Between JSON tokens: at most two spaces, or a line break and an indent. Unbounded, a model can write it for ever."""

_OPTIONS = '\n%llguidance {"no_forcing": true}\n'
"""Forced text may be spelled by any tokens: the engine has no tokenizer that would know the usual ones."""

_PROBE = b'"{['
_PROBE_BYTES = 4

_JSON_BLOCK = re.compile(r"%json\s*(?=\{)")
_IGNORED_ATTRIBUTES = re.compile(
    r"^\s*[?!]?[a-zA-Z_][\w-]*\s*\[[^\]\n]*\b(stop|max_tokens|temperature)\b", re.MULTILINE
)
_LIBRARY_FRAME = re.compile(r"\n\s*\d+ \| |\n?<non-verbose/>")
_LIBRARY_POSITION = re.compile(r"^(at )?\d+\(\d+\): (failed to compile JSON schema: )?")


@dataclass(frozen=True, slots=True)
class StructuredOutputSpec:
    """The form an output must have: exactly one of the first five. Field names as in vLLM, where it has them.

    json_schema: a JSON Schema (draft 2020-12; an object) as text.
    json_object: any JSON object.
    regex: a regular expression (Rust's syntax: no look-around, no back-references) for the whole output.
    choice: the output is one of these.
    grammar: a context-free grammar in llguidance's Lark, which begins at `start:`, or, if it has `::=`, in EBNF as
        llama.cpp writes it (GBNF), which begins at `root ::=`.
    disable_any_whitespace: JSON without whitespace between its tokens; otherwise it is bounded (`WHITESPACE`).

    Raises `InvalidRequestError` if it is not exactly one; `validate` looks at its content.
    """

    json_schema: str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool = False

    def __post_init__(self) -> None:
        given = self._given()
        if len(given) != 1:
            raise InvalidRequestError(
                "Structured output takes exactly one of json_schema, json_object, regex, choice and grammar; got "
                f"{' and '.join(given) or 'none'}.",
                PARAM,
            )
        if not isinstance(self.json_object, bool):
            raise InvalidRequestError("Structured output: json_object must be true or false.", PARAM)
        for name in ("json_schema", "regex", "grammar"):
            if not isinstance(getattr(self, name), str | None):
                raise InvalidRequestError(f"Structured output: {name} must be a string.", PARAM)
        if self.choice is not None:
            if not isinstance(self.choice, list | tuple) or not all(isinstance(text, str) for text in self.choice):
                raise InvalidRequestError("Structured output: choice must be a list of strings.", PARAM)
            object.__setattr__(self, "choice", tuple(self.choice))

    def _given(self) -> list[str]:
        names = ("json_schema", "json_object", "regex", "choice", "grammar")
        return [name for name in names if getattr(self, name) is not None and getattr(self, name) is not False]

    @property
    def kind(self) -> str:
        """The name of the field that is set."""
        return self._given()[0]


def validate(spec: StructuredOutputSpec) -> None:
    """Raise `InvalidRequestError` that says what is wrong with `spec`, or what of it cannot be held.

    Needs no tokenizer. Mostly about a millisecond, some hundred for the largest that pass: call it off the event loop.
    """
    _validate(spec)


@functools.lru_cache(maxsize=64)
def _validate(spec: StructuredOutputSpec) -> None:
    from llguidance import LLMatcher

    text = grammar_text(spec)
    failed, messages = LLMatcher.validate_grammar_with_warnings(text, None, limits=parser_limits(spec.kind))
    # Without a tokenizer, references to special tokens are checked when the engine compiles, and only there.
    special = [message for message in messages if message.startswith("no tokenizer")]
    if failed or len(special) < len(messages):
        raise library_error(spec, next(message for message in messages if message not in special))
    if not special:
        _probe(spec, text)


def _probe(spec: StructuredOutputSpec, text: str) -> None:
    """Take the first bytes of an output: a grammar that nothing matches, or that branches too much, shows there."""
    from llguidance import LLMatcher

    matcher = LLMatcher(_byte_tokenizer(), text, log_level=0, limits=parser_limits(spec.kind))
    for _ in range(_PROBE_BYTES):
        allowed = matcher.compute_bitmask()
        if matcher.is_error():
            raise library_error(spec, matcher.get_error())
        following = next((byte for byte in _PROBE if allowed[byte // 8] >> byte % 8 & 1), None)
        if following is None or matcher.is_stopped():
            return
        matcher.consume_token(following)


@functools.cache
def _byte_tokenizer() -> Any:
    from llguidance import LLTokenizer

    return LLTokenizer("byte")


@functools.cache
def parser_limits(kind: str) -> Any:
    """Bounds on what one grammar may cost. kind: as in `StructuredOutputSpec`.

    About 20 ms to build its lexer, 15 ms of lexing a mask, 100 MB of lexer states. Of parser items, objects with many
    optional properties have many and cheap ones; the time that an ambiguous grammar takes goes with their square.
    """
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=10_000 if kind == "grammar" else 100_000,
        max_items_in_row=1_000 if kind == "grammar" else 5_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def grammar_text(spec: StructuredOutputSpec) -> str:
    """`spec` as a Lark grammar of llguidance. Raises `InvalidRequestError` for what our own checks refuse."""
    content = getattr(spec, spec.kind)
    texts = content if isinstance(content, tuple) else (content,) if isinstance(content, str) else ()
    size = sum(len(_utf8(spec, text)) for text in texts)
    if size > MAX_BYTES:
        raise refusal(spec, f"it has {size} bytes; at most {MAX_BYTES} are allowed")
    if spec.json_object:
        return _json_rule({"type": "object"}, spec) + _OPTIONS
    if spec.json_schema is not None:
        return _json_rule(_checked_schema(spec, spec.json_schema), spec) + _OPTIONS
    if spec.regex is not None:
        return f"start: /{_lark_regex(spec, spec.regex)}/{_OPTIONS}"
    if spec.choice is not None:
        if not spec.choice or not all(spec.choice):
            raise refusal(spec, "it needs at least one string, and none may be empty")
        return "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(c, ensure_ascii=False) for c in spec.choice) + _OPTIONS
    assert spec.grammar is not None
    return _lark(spec, spec.grammar) + _OPTIONS


def refusal(spec: StructuredOutputSpec, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"Structured output, {spec.kind}: {why}.", PARAM)


def library_error(spec: StructuredOutputSpec, message: str) -> InvalidRequestError:
    """The library's message without its picture of the grammar, which shows our own additions."""
    why = _LIBRARY_FRAME.split(message)[0]
    if spec.kind != "grammar":
        why = _LIBRARY_POSITION.sub("", why)
    if why.startswith("NoExtension"):
        why = "nothing can match it"
    elif "Current row has" in why:
        why = "too many alternatives are open at once: give objects fewer optional properties or anyOf fewer branches"
    elif why.startswith("oneOf constraints"):
        why = "oneOf is supported where no value fits two of its branches, as with a const in each; write anyOf instead"
    why = " ".join(why.split())
    return refusal(spec, (why if len(why) <= 400 else why[:200] + " ... " + why[-200:]).rstrip("."))


def _utf8(spec: StructuredOutputSpec, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise refusal(spec, f"it has half a surrogate pair at character {error.start}") from error


def _checked_schema(spec: StructuredOutputSpec, text: str) -> dict[str, Any]:
    try:
        return check_schema(parse_schema(text))
    except ValueError as error:
        raise refusal(spec, str(error)) from error


def _json_rule(schema: dict[str, Any], spec: StructuredOutputSpec) -> str:
    return "start: " + _json_block(schema, spec)


def _json_block(schema: dict[str, Any], spec: StructuredOutputSpec) -> str:
    if spec.disable_any_whitespace:
        options: dict[str, Any] = {"whitespace_flexible": False}
    else:
        options = {"whitespace_pattern": WHITESPACE}
    return "%json " + json.dumps(schema | {"x-guidance": options}, ensure_ascii=True)


def _lark_regex(spec: StructuredOutputSpec, regex: str) -> str:
    from llguidance import regex_to_lark

    if "\n" in regex or "\r" in regex:
        raise refusal(spec, r"a line break must be written \n")
    if (len(regex) - len(regex.rstrip("\\"))) % 2:
        raise refusal(spec, "it ends in the middle of an escape")
    lark: str = regex_to_lark(regex, "d")
    return lark


def _lark(spec: StructuredOutputSpec, grammar: str) -> str:
    if "::=" in grammar:
        grammar = _ebnf_to_lark(spec, grammar)
    if found := _IGNORED_ATTRIBUTES.search(grammar):
        raise refusal(spec, f"the rule attribute {found[1]} is not supported; lazy and suffix are")
    parts, at = [], 0
    while found := _JSON_BLOCK.search(grammar, at):
        try:
            # Our own parse says where the block ends; that it is sound is checked by the stricter one.
            _, end = json.JSONDecoder().raw_decode(grammar, found.end())
        except (ValueError, RecursionError) as error:
            raise refusal(spec, f"%json at character {found.start()}: {error}") from error
        parts += [grammar[at : found.start()], _json_block(_checked_schema(spec, grammar[found.end() : end]), spec)]
        at = end
    return "".join([*parts, grammar[at:]])


def _ebnf_to_lark(spec: StructuredOutputSpec, grammar: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    rules = grammar.count("::=")
    if rules > MAX_EBNF_RULES:
        raise refusal(spec, f"it has {rules} rules; at most {MAX_EBNF_RULES} are allowed in EBNF")
    try:
        lark: str = gbnf_to_lark(grammar)
    except Exception as error:  # the converter raises bare Exception, IndexError and RecursionError too
        raise refusal(spec, f"it is no EBNF that can be read: {error or type(error).__name__}") from error
    return lark
