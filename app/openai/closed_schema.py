"""Objects of a JSON Schema held to the properties that it names.

JSON Schema allows others wherever it does not forbid them, and a small model writes them until its limit. OpenAI's
strict schemas must forbid them; what is closed here fits the schema as it was given.
"""

from collections.abc import Callable, Iterator
from typing import Any

from engine.structured.json_schema import MAX_DEPTH, SUBSCHEMA, SUBSCHEMA_LISTS, SUBSCHEMA_MAPS

Schema = dict[str, Any]

_OF_OBJECTS = frozenset(("properties", "required", "patternProperties", "additionalProperties", "minProperties"))
_COMBINE = frozenset(("allOf", "anyOf", "oneOf", "$ref"))
_SAY_MORE = frozenset(("additionalProperties", "patternProperties", "unevaluatedProperties", "minProperties"))


def closed(schema: Schema) -> Schema:
    """`schema` with `additionalProperties: false` in each object that lists `properties` and says nothing of others.

    Left as it is where an object is described by several schemas together, which closed would exclude one another.
    """
    return schema if _combines(schema, 0) else _closed(schema, 0)


def _combines(schema: Any, depth: int) -> bool:
    if not isinstance(schema, dict) or depth > MAX_DEPTH:  # so deep a one is refused elsewhere
        return False
    together = schema.keys() & _COMBINE
    if together and (schema.keys() & _OF_OBJECTS or len(together) > 1):
        return True
    if isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1:
        return True
    return any(_combines(child, depth + 1) for child in _subschemas(schema))


def _closed(schema: Any, depth: int) -> Any:
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return schema
    inside = _with_subschemas(schema, lambda child: _closed(child, depth + 1))
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list) or schema.keys() & _SAY_MORE:
        return inside
    if not all(isinstance(name, str) and name in properties for name in required):
        return inside
    return inside | {"additionalProperties": False}


def _subschemas(schema: Schema) -> Iterator[Any]:
    for key, value in schema.items():
        if key in SUBSCHEMA_LISTS and isinstance(value, list):
            yield from value
        elif key in SUBSCHEMA_MAPS and isinstance(value, dict):
            yield from value.values()
        elif key in SUBSCHEMA:
            yield value


def _with_subschemas(schema: Schema, change: Callable[[Any], Any]) -> Schema:
    changed: Schema = {}
    for key, value in schema.items():
        if key in SUBSCHEMA_LISTS and isinstance(value, list):
            changed[key] = [change(item) for item in value]
        elif key in SUBSCHEMA_MAPS and isinstance(value, dict):
            changed[key] = {name: change(item) for name, item in value.items()}
        else:
            changed[key] = change(value) if key in SUBSCHEMA else value
    return changed
