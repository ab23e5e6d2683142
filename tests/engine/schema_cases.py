"""JSON Schemas with instances that fit them and instances that do not, for tests and measurements of coverage.

Properties stand in the order of `properties`, since a grammar fixes their order.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SchemaCase:
    """valid, invalid: instances by the JSON Schema standard (draft 2020-12, formats asserted)."""

    name: str
    schema: Any
    valid: tuple[Any, ...]
    invalid: tuple[Any, ...]


def _obj(properties: dict[str, Any], required: list[str] | None = None, **more: Any) -> dict[str, Any]:
    required = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False} | more


STRING, INTEGER, NUMBER, BOOLEAN, NULL = ({"type": name} for name in ("string", "integer", "number", "boolean", "null"))
UUID = "123e4567-e89b-12d3-a456-426614174000"

CASES = (
    # Types
    SchemaCase("string", STRING, ("", "a b", 'q"\\\n\t', "é漢🙂"), (1, None, ["a"], {})),
    SchemaCase("integer", INTEGER, (0, -7, 12345678901), (1.5, "1", True)),
    SchemaCase("number", NUMBER, (0, -1.25, 1e20, 3), ("1", None)),
    SchemaCase("boolean", BOOLEAN, (True, False), (0, "true", None)),
    SchemaCase("null", NULL, (None,), (0, "", False)),
    SchemaCase("type list", {"type": ["string", "null"]}, ("x", None), (1, [], True)),
    SchemaCase("any", {}, (1, "a", [1, {"b": None}], {"c": [True]}), ()),
    SchemaCase("open object", {"type": "object"}, ({}, {"a": 1, "b": {"c": []}}), ([], "a", 1)),
    SchemaCase("open array", {"type": "array"}, ([], [1, "a", [None]]), ({}, "a")),
    # Values
    SchemaCase("enum of strings", {"enum": ["red", "green"]}, ("red", "green"), ("blue", "re", 1)),
    SchemaCase(
        "enum of kinds", {"enum": [1, "1", None, True, [1, 2], {"a": 1}]}, (1, "1", None, [1, 2], {"a": 1}), (2,)
    ),
    SchemaCase("enum and type", {"type": "integer", "enum": [1, 2, "3"]}, (1, 2), ("3", 3)),
    SchemaCase(
        "enum of unicode", {"enum": ["naïve", "日本", "🙂", 'a"b\\c']}, ("naïve", "日本", "🙂", 'a"b\\c'), ("naive",)
    ),
    SchemaCase(
        "enum of 2000",
        {"enum": [f"value-{i:05d}" for i in range(2000)]},
        ("value-00000", "value-01999"),
        ("value-02000",),
    ),
    SchemaCase("const", {"const": "on"}, ("on",), ("off", 1)),
    SchemaCase("const number", {"const": 42}, (42,), (41, 420, "42")),
    SchemaCase("const of an object", {"const": {"a": [1, None]}}, ({"a": [1, None]},), ({"a": [1]}, {})),
    SchemaCase(
        "const beyond 2**53", {"const": 9007199254740993}, (9007199254740993,), (9007199254740992, 9007199254740994)
    ),
    # Objects
    SchemaCase("required", _obj({"a": INTEGER, "b": STRING}), ({"a": 1, "b": "x"},), ({"a": 1}, {"b": "x"}, {})),
    SchemaCase("optional", _obj({"a": INTEGER, "b": STRING}, ["a"]), ({"a": 1}, {"a": 1, "b": "x"}), ({"b": "x"}, {})),
    SchemaCase(
        "all optional",
        _obj({"a": INTEGER, "b": STRING}, []),
        ({}, {"a": 1}, {"b": "x"}, {"a": 1, "b": ""}),
        ({"c": 1},),
    ),
    SchemaCase("no more properties", _obj({"a": INTEGER}), ({"a": 1},), ({"a": 1, "b": 2},)),
    SchemaCase(
        "more properties",
        {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]},
        ({"a": 1}, {"a": 1, "z": [1]}),
        ({"z": 1}, {"a": "x"}),
    ),
    SchemaCase(
        "typed additional properties",
        {"type": "object", "properties": {"a": STRING}, "additionalProperties": INTEGER},
        ({"a": "x", "n": 2}, {"n": 1, "m": 2}, {}),
        ({"n": "x"}, {"a": 1}),
    ),
    SchemaCase("map", {"type": "object", "additionalProperties": NUMBER}, ({}, {"x": 1.5, "y": 2}), ({"x": "1"},)),
    SchemaCase(
        "required but not in properties",
        {"type": "object", "required": ["k"], "additionalProperties": STRING},
        ({"k": "v"},),
        ({}, {"k": 1}),
    ),
    SchemaCase("minProperties", {"type": "object", "minProperties": 1}, ({"a": 1}, {"a": 1, "b": 2}), ({},)),
    SchemaCase(
        "maxProperties", {"type": "object", "maxProperties": 2}, ({}, {"a": 1, "b": 2}), ({"a": 1, "b": 2, "c": 3},)
    ),
    SchemaCase(
        "patternProperties",
        {"type": "object", "patternProperties": {"^n_": INTEGER}, "additionalProperties": False},
        ({"n_a": 1}, {}),
        ({"n_a": "x"}, {"m": 1}),
    ),
    SchemaCase(
        "propertyNames",
        {"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}},
        ({"abc": 1},),
        ({"ABC": 1},),
    ),
    SchemaCase(
        "dependentRequired",
        {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}, "dependentRequired": {"a": ["b"]}},
        ({"a": 1, "b": 2}, {"b": 1}),
        ({"a": 1},),
    ),
    SchemaCase(
        "unevaluatedProperties",
        {"type": "object", "properties": {"a": INTEGER}, "unevaluatedProperties": False},
        ({"a": 1}, {}),
        ({"a": 1, "b": 1},),
    ),
    SchemaCase(
        "nested",
        _obj({"p": _obj({"q": _obj({"r": {"type": "array", "items": INTEGER}})})}),
        ({"p": {"q": {"r": [1, 2]}}},),
        ({"p": {"q": {"r": ["x"]}}}, {"p": {"q": {}}}),
    ),
    SchemaCase(
        "odd property names",
        _obj({'qu"ote': INTEGER, "back\\slash": INTEGER, "é 漢": INTEGER, "": INTEGER}),
        ({'qu"ote': 1, "back\\slash": 2, "é 漢": 3, "": 4},),
        ({'qu"ote': 1},),
    ),
    # Arrays
    SchemaCase("items", {"type": "array", "items": INTEGER}, ([], [1], [1, 2, 3]), (["a"], [1, None])),
    SchemaCase("minItems", {"type": "array", "items": INTEGER, "minItems": 2}, ([1, 2], [1, 2, 3]), ([], [1])),
    SchemaCase("maxItems", {"type": "array", "items": INTEGER, "maxItems": 2}, ([], [1, 2]), ([1, 2, 3],)),
    SchemaCase(
        "item counts",
        {"type": "array", "items": STRING, "minItems": 1, "maxItems": 3},
        (["a"], ["a", "b", "c"]),
        ([], ["a"] * 4),
    ),
    SchemaCase(
        "prefixItems",
        {"type": "array", "prefixItems": [INTEGER, STRING], "items": False, "minItems": 2},
        ([1, "a"],),
        ([1], [1, "a", 2], ["a", 1]),
    ),
    SchemaCase(
        "prefixItems and items",
        {"type": "array", "prefixItems": [INTEGER], "items": STRING},
        ([1, "a", "b"], [1], []),
        ([1, 2], ["a"]),
    ),
    SchemaCase(
        "matrix",
        {"type": "array", "items": {"type": "array", "items": NUMBER, "minItems": 2, "maxItems": 2}},
        ([[1, 2], [3, 4]],),
        ([[1]], [[1, 2, 3]]),
    ),
    SchemaCase(
        "uniqueItems", {"type": "array", "items": {"enum": [1, 2, 3]}, "uniqueItems": True}, ([1, 2], [3]), ([1, 1],)
    ),
    SchemaCase("contains", {"type": "array", "contains": {"const": 5}}, ([1, 5],), ([1], [])),
    # Strings
    SchemaCase("minLength", {"type": "string", "minLength": 3}, ("abc", "漢字漢"), ("ab", "")),
    SchemaCase("maxLength", {"type": "string", "maxLength": 3}, ("", "abc", "🙂🙂🙂"), ("abcd",)),
    SchemaCase("length", {"type": "string", "minLength": 2, "maxLength": 4}, ("ab", 'a"\n'), ("a", "abcde")),
    SchemaCase(
        "pattern", {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}, ("AB-123",), ("AB-12", "ab-123", "xAB-123")
    ),
    SchemaCase("pattern unanchored", {"type": "string", "pattern": "[0-9]{2}"}, ("12", "a34b"), ("1", "ab")),
    SchemaCase(
        "pattern with escapes",
        {"type": "string", "pattern": '^"\\\\\\d+\\s$'},
        ('"\\12 ', '"\\1\n'),
        ('"\\a ', "\\12 "),
    ),
    SchemaCase("pattern of unicode", {"type": "string", "pattern": "^[а-я]+$"}, ("привет",), ("hello", "")),
    SchemaCase("pattern with lookahead", {"type": "string", "pattern": "^(?=.*[0-9])[a-z0-9]+$"}, ("a1",), ("aa",)),
    SchemaCase("pattern with backreference", {"type": "string", "pattern": "^(a|b)\\1$"}, ("aa",), ("ab",)),
    SchemaCase(
        "pattern and length",
        {"type": "string", "pattern": "^[a-z]+$", "minLength": 2, "maxLength": 3},
        ("ab", "abc"),
        ("a", "abcd", "A1"),
    ),
    SchemaCase("date", {"type": "string", "format": "date"}, ("2024-02-29",), ("2024-13-01", "x")),
    SchemaCase(
        "date-time",
        {"type": "string", "format": "date-time"},
        ("2024-02-29T12:00:00Z", "2024-01-01T00:00:00.5+02:00"),
        ("2024-02-29", "x"),
    ),
    SchemaCase("time", {"type": "string", "format": "time"}, ("12:34:56Z",), ("25:00:00Z", "x")),
    SchemaCase("email", {"type": "string", "format": "email"}, ("a.b@example.com",), ("a", "@x")),
    SchemaCase("uuid", {"type": "string", "format": "uuid"}, (UUID,), (UUID[:-1], "x")),
    SchemaCase("ipv4", {"type": "string", "format": "ipv4"}, ("10.0.0.255",), ("10.0.0.256", "1.2.3")),
    SchemaCase("ipv6", {"type": "string", "format": "ipv6"}, ("2001:db8::1",), ("1.2.3.4.5", "x")),
    SchemaCase("uri", {"type": "string", "format": "uri"}, ("https://example.com/a?b=c#d",), ("no scheme", "/a")),
    SchemaCase("hostname", {"type": "string", "format": "hostname"}, ("a.example.com",), ("-a", "a b")),
    SchemaCase("duration", {"type": "string", "format": "duration"}, ("P1DT2H",), ("1D", "P")),
    SchemaCase("format regex", {"type": "string", "format": "regex"}, ("a+",), ("(",)),
    SchemaCase("unknown format", {"type": "string", "format": "no-such-format"}, ("x",), ()),
    # Numbers
    SchemaCase(
        "integer range", {"type": "integer", "minimum": -3, "maximum": 120}, (-3, 0, 9, 99, 120), (-4, 121, 1000)
    ),
    SchemaCase(
        "exclusive range", {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 10}, (1, 9), (0, 10, -1)
    ),
    SchemaCase("number range", {"type": "number", "minimum": 0, "maximum": 1}, (0, 0.5, 1, 1.0), (-0.1, 1.01, 2)),
    SchemaCase("minimum alone", {"type": "integer", "minimum": 18}, (18, 19, 100, 99999), (17, 1, -18)),
    SchemaCase("multipleOf", {"type": "integer", "multipleOf": 5}, (0, 5, 100, -15), (1, 12)),
    SchemaCase("multipleOf of cents", {"type": "number", "multipleOf": 0.01}, (1.25, 3, 0.1), (1.234,)),
    # Combinations
    SchemaCase("anyOf", {"anyOf": [INTEGER, {"type": "string", "maxLength": 2}]}, (1, "ab"), ("abc", None)),
    SchemaCase(
        "anyOf that overlap",
        {"anyOf": [{"type": "integer", "maximum": 5}, {"type": "integer", "minimum": 3}]},
        (1, 4, 9),
        ("a",),
    ),
    SchemaCase(
        "oneOf by a tag",
        {"oneOf": [_obj({"kind": {"const": "a"}, "x": INTEGER}), _obj({"kind": {"const": "b"}, "y": STRING})]},
        ({"kind": "a", "x": 1}, {"kind": "b", "y": "s"}),
        ({"kind": "a", "y": "s"}, {"kind": "c", "x": 1}),
    ),
    SchemaCase("oneOf of types", {"oneOf": [STRING, INTEGER]}, ("a", 1), (None, [])),
    SchemaCase(
        "oneOf that overlap",
        {"oneOf": [{"type": "integer", "multipleOf": 2}, {"type": "integer", "multipleOf": 3}]},
        (2, 3),
        (6, 1),
    ),
    SchemaCase("allOf", {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]}, (3, 5), (2, 6, "a")),
    SchemaCase(
        "allOf of objects",
        {
            "allOf": [
                {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]},
                {"type": "object", "properties": {"b": STRING}, "required": ["b"]},
            ]
        },
        ({"a": 1, "b": "x"},),
        ({"a": 1}, {"b": "x"}),
    ),
    SchemaCase(
        "anyOf with siblings",
        {
            "type": "object",
            "properties": {"a": INTEGER, "b": INTEGER},
            "additionalProperties": False,
            "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
        },
        ({"a": 1}, {"b": 1}, {"a": 1, "b": 2}),
        ({},),
    ),
    SchemaCase("not", {"type": "string", "not": {"const": "a"}}, ("b",), ("a",)),
    SchemaCase(
        "if then else",
        {
            "type": "object",
            "properties": {"k": {"enum": ["n", "s"]}, "v": {}},
            "required": ["k", "v"],
            "if": {"properties": {"k": {"const": "n"}}},
            "then": {"properties": {"v": NUMBER}},
            "else": {"properties": {"v": STRING}},
        },
        ({"k": "n", "v": 1}, {"k": "s", "v": "x"}),
        ({"k": "n", "v": "x"}, {"k": "s", "v": 1}),
    ),
    # References
    SchemaCase(
        "$ref",
        _obj({"p": {"$ref": "#/$defs/point"}}, **{"$defs": {"point": _obj({"x": INTEGER})}}),
        ({"p": {"x": 1}},),
        ({"p": {"x": "a"}}, {"p": 1}),
    ),
    SchemaCase("definitions", {"$ref": "#/definitions/n", "definitions": {"n": INTEGER}}, (1,), ("a",)),
    SchemaCase("$ref with siblings", {"$ref": "#/$defs/n", "minimum": 5, "$defs": {"n": INTEGER}}, (5, 9), (4, "a")),
    SchemaCase("$ref with an escaped name", {"$ref": "#/$defs/a~1b", "$defs": {"a/b": INTEGER}}, (1,), ("a",)),
    SchemaCase("$anchor", {"$ref": "#n", "$defs": {"n": {"$anchor": "n", "type": "integer"}}}, (1,), ("a",)),
    SchemaCase("remote $ref", {"$ref": "https://example.com/schema.json"}, (), ()),
    SchemaCase(
        "recursive list",
        {
            "$ref": "#/$defs/node",
            "$defs": {"node": _obj({"v": INTEGER, "next": {"anyOf": [{"$ref": "#/$defs/node"}, NULL]}})},
        },
        ({"v": 1, "next": None}, {"v": 1, "next": {"v": 2, "next": None}}),
        ({"v": 1}, {"v": 1, "next": {"v": "x", "next": None}}),
    ),
    SchemaCase(
        "recursive tree",
        _obj({"name": STRING, "children": {"type": "array", "items": {"$ref": "#"}}}),
        ({"name": "a", "children": [{"name": "b", "children": []}]},),
        ({"name": "a", "children": [{"name": "b"}]},),
    ),
    SchemaCase(
        "mutual recursion",
        {
            "$ref": "#/$defs/a",
            "$defs": {
                "a": _obj({"b": {"$ref": "#/$defs/b"}}, []),
                "b": _obj({"a": {"$ref": "#/$defs/a"}}, []),
            },
        },
        ({}, {"b": {}}, {"b": {"a": {"b": {}}}}),
        ({"a": {}}, {"b": {"b": {}}}),
    ),
    # As clients make them
    SchemaCase(
        "annotations",
        _obj(
            {"a": {"type": "integer", "title": "A", "description": "d", "default": 0, "examples": [1]}},
            title="T",
            description="d",
        ),
        ({"a": 3},),
        ({"a": "x"},),
    ),
    SchemaCase(
        "a pydantic model",
        {
            "$defs": {
                "Color": {"enum": ["r", "g"], "title": "Color", "type": "string"},
                "Item": _obj(
                    {"color": {"$ref": "#/$defs/Color"}, "n": {"title": "N", "type": "integer"}}, title="Item"
                ),
            },
            "title": "Order",
            **_obj(
                {
                    "items": {"items": {"$ref": "#/$defs/Item"}, "title": "Items", "type": "array"},
                    "note": {"anyOf": [STRING, NULL], "default": None, "title": "Note"},
                }
            ),
        },
        ({"items": [{"color": "r", "n": 1}], "note": None}, {"items": [], "note": "x"}),
        ({"items": [{"color": "b", "n": 1}], "note": None}, {"items": []}),
    ),
    SchemaCase(
        "tool arguments",
        _obj(
            {
                "city": STRING,
                "unit": {"type": "string", "enum": ["c", "f"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 14},
            },
            ["city"],
        ),
        ({"city": "Rome"}, {"city": "Rome", "unit": "c", "days": 3}),
        ({"unit": "c"}, {"city": "Rome", "days": 15}),
    ),
)
