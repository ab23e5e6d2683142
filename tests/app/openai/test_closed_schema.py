"""Which objects of a JSON Schema are held to the properties that it names."""

import json
from typing import Any

import pytest

from app.openai.closed_schema import closed
from app.openai.requests import parse_chat
from engine.structured.json_schema import MAX_DEPTH

TEXT = {"type": "string"}
OPEN = {"type": "object", "properties": {"a": TEXT}, "required": ["a"]}
SHUT = OPEN | {"additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (OPEN, SHUT),
        ({"type": "array", "items": OPEN}, {"type": "array", "items": SHUT}),
        ({"anyOf": [OPEN, {"type": "null"}]}, {"anyOf": [SHUT, {"type": "null"}]}),
        ({"properties": {"properties": OPEN}}, {"properties": {"properties": SHUT}, "additionalProperties": False}),
        ({"$ref": "#/$defs/A", "$defs": {"A": OPEN}}, {"$ref": "#/$defs/A", "$defs": {"A": SHUT}}),
        ({"enum": [OPEN]}, {"enum": [OPEN]}),
    ],
)
def test_objects_that_list_their_properties_have_no_others(schema: dict[str, Any], expected: dict[str, Any]) -> None:
    assert closed(schema) == expected


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        OPEN | {"additionalProperties": True},
        OPEN | {"additionalProperties": TEXT},
        OPEN | {"patternProperties": {"^x": TEXT}},
        OPEN | {"required": ["a", "b"]},
        OPEN | {"minProperties": 2},
        {"allOf": [OPEN, {"properties": {"b": TEXT}}]},
        OPEN | {"anyOf": [{"properties": {"b": TEXT}}, {"properties": {"c": TEXT}}]},
        {"required": ["b"], "anyOf": [OPEN]},
        {"$ref": "#/$defs/A", "properties": {"b": TEXT}, "$defs": {"A": OPEN}},
        {"properties": "nonsense"},
        {"properties": {}, "required": 5},
    ],
)
def test_what_may_have_others_keeps_them(schema: dict[str, Any]) -> None:
    assert closed(schema) == schema


def test_a_schema_of_any_depth_is_left_to_the_check_that_refuses_it() -> None:
    schema: dict[str, Any] = OPEN
    for _ in range(10 * MAX_DEPTH):
        schema = {"items": schema}
    assert closed(schema) == schema


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": OPEN}}},
        {"structured_outputs": {"json": OPEN}},
        {"guided_json": json.dumps(OPEN)},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"o": OPEN}}}}],
         "tool_choice": {"type": "function", "function": {"name": "f"}}},
    ],
)  # fmt: skip
def test_every_way_to_ask_for_a_schema_closes_it(body: dict[str, Any]) -> None:
    request = parse_chat(json.dumps({"messages": [{"role": "user", "content": "hi"}]} | body).encode())
    structure = request.structure()
    assert structure is not None
    text = structure.checked().json_schema
    assert text is not None
    schema = json.loads(text)
    assert schema["additionalProperties"] is False
    assert schema["properties"].get("o", SHUT) == SHUT
