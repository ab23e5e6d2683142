"""What of structured output is accepted at the door, and what is refused with which words."""

import json
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.errors import InvalidRequestError
from engine.structured.spec import MAX_BYTES, StructuredOutputSpec, validate

ROOT = Path(__file__).parents[2]


def schema(value: object) -> StructuredOutputSpec:
    return StructuredOutputSpec(json_schema=json.dumps(value))


def nested(depth: int) -> dict[str, object]:
    value: dict[str, object] = {"type": "integer"}
    for _ in range(depth):
        value = {"type": "array", "items": value}
    return value


def objects(count: int, **more: object) -> dict[str, object]:
    return {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(count)}, **more}


def refusal(spec: StructuredOutputSpec) -> str:
    with pytest.raises(InvalidRequestError) as raised:
        validate(spec)
    assert raised.value.param == "structured_outputs"
    return str(raised.value)


def test_a_spec_travels_and_is_a_key() -> None:
    spec = StructuredOutputSpec(choice=["a", "b"])
    assert spec.choice == ("a", "b")
    assert {pickle.loads(pickle.dumps(spec)): 1}[StructuredOutputSpec(choice=("a", "b"))] == 1
    assert spec != StructuredOutputSpec(choice=("a", "b"), disable_any_whitespace=True)
    assert spec.kind == "choice"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "got none"),
        ({"regex": "a", "json_object": True}, "got json_object and regex"),
        ({"regex": "a", "grammar": ""}, "got regex and grammar"),
        ({"regex": 5}, "regex must be a string"),
        ({"json_schema": {}}, "json_schema must be a string"),
        ({"choice": "ab"}, "choice must be a list of strings"),
        ({"choice": 5}, "choice must be a list of strings"),
        ({"json_object": "yes"}, "json_object must be true or false"),
        ({"choice": [1]}, "choice must be a list of strings"),
    ],
)
def test_a_spec_is_exactly_one_thing(fields: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        StructuredOutputSpec(**fields)


@pytest.mark.parametrize(
    "spec",
    [
        StructuredOutputSpec(json_object=True),
        StructuredOutputSpec(regex=r"\d{3}/[a-z]+\\"),
        StructuredOutputSpec(choice=("yes", "no", "é \n\"'\\/漢🙂")),
        StructuredOutputSpec(grammar='start: "a" | /b+/'),
        StructuredOutputSpec(grammar='root ::= "a" word\nword ::= [a-z]+'),
        StructuredOutputSpec(grammar='start: "<call>" %json {"type": "integer"} "</call>"'),
        StructuredOutputSpec(grammar="start: <|im_start|> /[a-z]+/"),
        schema({"type": "integer", "x-note": "ours", "uniqueItems": False, "nullable": False}),
        schema({"$schema": "http://json-schema.org/draft-07/schema#", "type": "array", "items": [{}]}),
    ],
    ids=lambda spec: spec.kind,
)
def test_what_can_be_held_is_accepted(spec: StructuredOutputSpec) -> None:
    validate(spec)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (StructuredOutputSpec(regex="(a"), "unclosed group"),
        (StructuredOutputSpec(regex="(?=a)b"), "look-around"),
        (StructuredOutputSpec(regex=r"(a)\1"), "backreferences"),
        (StructuredOutputSpec(regex=r"\bfoo"), "lookarounds not supported"),
        (StructuredOutputSpec(regex="a\\"), "in the middle of an escape"),
        (StructuredOutputSpec(regex="a\nb"), r"must be written \n"),
        (StructuredOutputSpec(regex=r"[^\x00-\U0010FFFF]"), "nothing can match it"),
        (StructuredOutputSpec(regex="\ud800"), "half a surrogate pair"),
        (StructuredOutputSpec(choice=()), "at least one string"),
        (StructuredOutputSpec(choice=("a", "")), "none may be empty"),
        (StructuredOutputSpec(grammar=""), "no start rule"),
        (StructuredOutputSpec(grammar="start: foo"), 'at 1(8): unknown name: "foo"'),
        (StructuredOutputSpec(grammar='start: "a'), "lexer error"),
        (StructuredOutputSpec(grammar='root ::= "a'), "no EBNF that can be read: Unexpected end"),
        (StructuredOutputSpec(grammar='root ::= "a" b'), "Rule 'b' not found"),
        (StructuredOutputSpec(grammar="start: a\na[temperature=0.5]: /b/"), "temperature is not supported"),
        (StructuredOutputSpec(grammar='start: a "c"\na[stop="c"]: /b+/'), "stop is not supported"),
        (StructuredOutputSpec(grammar='start: %json {"not": {}}'), "'not' at #/not"),
        (StructuredOutputSpec(grammar='start: %json {"a": '), "%json at character 7"),
        (StructuredOutputSpec(json_schema="{"), "it is not JSON"),
        (StructuredOutputSpec(json_schema="true"), "must be a JSON object, got true"),
        (StructuredOutputSpec(json_schema='{"const": NaN}'), "NaN is no JSON number"),
        (StructuredOutputSpec(json_schema='{"minimum": 1e999}'), "1e999 is too large"),
        (schema({"typ": "string"}), "'typ' at #/typ is not supported"),
        (schema({"properties": {"a": {"not": {}}}}), "'not' at #/properties/a/not"),
        (schema({"allOf": [{"if": True, "then": False}]}), "'if' at #/allOf/0/if"),
        (schema({"contains": {}}), "'contains'"),
        (schema({"uniqueItems": True}), "check the output"),
        (schema({"nullable": True, "type": "string"}), '{"type": ["...", "null"]}'),
        (schema({"x-guidance": {"lenient": True}, "not": {}}), "'not'"),
        (schema({"properties": {"a": {"$id": "b"}}}), "$id at #/properties/a/$id"),
        (schema({"type": "strin"}), "Invalid type: strin"),
        (schema({"required": "a"}), "'required'"),
        (schema({"type": "string", "minLength": -1}), "'minLength'"),
        (schema({"type": "string", "format": "no-such"}), "Unknown format: no-such"),
        (schema({"type": "string", "pattern": "(?!a)b"}), "look-around"),
        (schema({"$ref": "#/$defs/nope"}), "does not exist"),
        (schema({"$ref": "https://example.com/a.json"}), "not present in a registry"),
        (schema({"$ref": "#"}), "nothing can match it"),
        (schema({"type": "integer", "minimum": 5, "maximum": 4}), "minimum (5) is greater than maximum (4)"),
        (schema({"oneOf": [{"type": "integer"}, {"type": "number"}]}), "write anyOf instead"),
        (schema({"const": 2**53 + 1}), "9007199254740993 is beyond 2**53"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_cannot_be_held_is_refused_by_name(spec: StructuredOutputSpec, words: str) -> None:
    message = refusal(spec)
    assert message.startswith(f"Structured output, {spec.kind}: ")
    assert words in message
    assert "no_forcing" not in message
    assert "\n" not in message
    assert len(message) < 600


PATHOLOGICAL = {
    "nested quantifiers": StructuredOutputSpec(regex="((a+)+)+(x+x+)+y"),
    "a count of counts": StructuredOutputSpec(regex="(((a{1000}){1000}){1000}){1000}"),
    "a huge count": StructuredOutputSpec(regex=".{0,1000000}"),
    "an exponential automaton": StructuredOutputSpec(regex="[ab]*a[ab]{200}"),
    "many parentheses": StructuredOutputSpec(regex="(" * 100_000 + ")" * 100_000),
    "long": StructuredOutputSpec(regex="a" * (MAX_BYTES + 1)),
    "many choices": StructuredOutputSpec(choice=tuple(f"choice {i}" for i in range(15_000))),
    "deep EBNF": StructuredOutputSpec(grammar="root ::= " + "(" * 50_000 + '"a"' + ")" * 50_000),
    "EBNF of many rules": StructuredOutputSpec(
        grammar="root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(5000)) + 'r5000 ::= "a"'
    ),
    "deep Lark": StructuredOutputSpec(grammar="start: " + "(" * 50_000 + '"a"' + ")" * 50_000),
    "an ambiguous grammar": StructuredOutputSpec(grammar='start: start start | "a"'),
    "an intersection": StructuredOutputSpec(
        grammar="start: A\nA: " + " & ".join(f"/({'a' * p})+/" for p in (2, 3, 5, 7, 11, 13, 17, 19)) + " & /a+b/"
    ),
    "deep text": StructuredOutputSpec(json_schema='{"items":' * 20_000 + "{}" + "}" * 20_000),
    "deep": schema(nested(65)),
    "counts": schema({"type": "array", "items": {"type": "string", "minLength": 10**9}, "minItems": 10**9}),
    "a slow multiple": schema({"type": "integer", "multipleOf": 123456789}),
    "a slow product of multiples": schema({"allOf": [{"multipleOf": 7919}, {"multipleOf": 997}]}),
    "a multiple out of sight": schema({"default": {"multipleOf": 123456789}, "$ref": "#/default"}),
    "many optional properties": schema(objects(5000)),
    "optional properties of many objects": schema({"anyOf": [objects(450, title=str(i)) for i in range(10)]}),
    "many properties": schema(objects(6000, required=[f"p{i}" for i in range(6000)])),
    "many patterns": schema({"patternProperties": {f"^p{i}[a-z]*$": {} for i in range(300)}}),
    "a product of choices": schema(
        {"allOf": [{"anyOf": [{"properties": {f"p{i}_{j}": {}}} for j in range(10)]} for i in range(20)]}
    ),
    "patterns to intersect": schema(
        {"allOf": [{"type": "string", "pattern": f"^(a{{{p}}})+$"} for p in (101, 103, 107, 109)]}
    ),
    "a tower of references": schema(
        {
            "$ref": "#/$defs/d30",
            "$defs": {"d0": {"type": "object"}}
            | {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i - 1}"}] * 2} for i in range(1, 31)},
        }
    ),
    "a huge enum": schema({"enum": [f"v{i}" for i in range(25_000)]}),
}


def decided(work: Callable[[], None]) -> bool:
    """Whether `work` ends within a minute; without bounds, most of these take minutes and gigabytes."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(60)
    return not thread.is_alive()


@pytest.mark.parametrize("spec", PATHOLOGICAL.values(), ids=PATHOLOGICAL.keys())
def test_the_pathological_is_refused_or_accepted_but_decided(spec: StructuredOutputSpec) -> None:
    messages: list[str] = []

    def work() -> None:
        try:
            validate(spec)
        except InvalidRequestError as error:
            messages.append(str(error))

    assert decided(work)
    assert all(len(message) < 600 for message in messages)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("many parentheses", "nested parentheses/brackets (250)"),
        ("long", "262145 bytes; at most 262144"),
        ("deep text", "64 levels"),
        ("deep", "64 levels"),
        ("deep EBNF", "recursion"),
        ("EBNF of many rules", "5002 rules; at most 500"),
        ("deep Lark", "too deeply nested"),
        ("a slow multiple", "least common multiple"),
        ("a slow product of multiples", "7895243; at most 10000"),
        ("a multiple out of sight", "least common multiple"),
        ("many optional properties", "5000 optional properties; at most 500"),
        ("optional properties of many objects", "too many alternatives are open at once"),
        ("many properties", "6000 properties; at most 5000"),
        ("many patterns", "300 patternProperties; at most 100"),
        ("a product of choices", "schema too large"),
    ],
)
def test_limits_say_what_they_are(name: str, words: str) -> None:
    assert words in refusal(PATHOLOGICAL[name])


def test_the_grammar_library_and_torch_load_only_when_needed() -> None:
    code = (
        "import sys, engine.structured.grammar, engine.structured.spec as s\n"
        "spec = s.StructuredOutputSpec(json_object=True)\n"
        "print(*(m for m in ('llguidance', 'torch', 'transformers') if m in sys.modules))\n"
        "s.validate(spec)\n"
        "print(*(m for m in ('llguidance', 'torch', 'transformers') if m in sys.modules))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.split("\n")[:2] == ["", "llguidance"]
