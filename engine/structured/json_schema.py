"""JSON Schemas as requests bring them: what is refused before a grammar is made of one.

The grammar library refuses the keywords that it knows and cannot hold. It passes over the ones that it does not know,
and some values cost it minutes: both are refused here.
"""

import json
import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

MAX_DEPTH = 64
"""Of nested values in a schema, counted in objects and arrays."""

MAX_PROPERTIES = 5000
"""In a whole schema."""

MAX_OPTIONAL_PROPERTIES = 500
"""Of one object: each is a way on from each before it, and compile time goes with the square."""

MAX_PATTERN_PROPERTIES = 100
"""In a whole schema: each pair of patterns is compared."""

MAX_MULTIPLE = 10_000
"""Least common multiple of all `multipleOf`, in units of their last digit: an automaton of so many states is built."""

MAX_INTEGER = 2**53
"""Beyond it the library's numbers, which are doubles, are no longer exact."""

SUBSCHEMA = {"additionalProperties", "additionalItems", "items"}
SUBSCHEMA_LISTS = {"allOf", "anyOf", "oneOf", "prefixItems", "items"}
SUBSCHEMA_MAPS = {"properties", "patternProperties", "$defs", "definitions"}
ASSERTIONS = {
    "$ref", "type", "const", "enum", "required", "minItems", "maxItems", "minProperties", "maxProperties",
    "minLength", "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
    "multipleOf",
}  # fmt: skip
ANNOTATIONS = {
    "$schema", "$id", "id", "$anchor", "$comment", "title", "description", "default", "example", "examples",
    "deprecated", "readOnly", "writeOnly", "contentMediaType", "contentEncoding", "discriminator", "externalDocs",
    "xml", "enumNames", "enumDescriptions", "markdownDescription", "propertyOrdering",
}  # fmt: skip
KNOWN = SUBSCHEMA | SUBSCHEMA_LISTS | SUBSCHEMA_MAPS | ASSERTIONS | ANNOTATIONS
NO_OPS: dict[str, Any] = {"uniqueItems": False, "nullable": False, "unevaluatedProperties": True}
HINTS = {
    "nullable": 'write {"type": ["...", "null"]} instead',
    "unevaluatedProperties": "write additionalProperties instead",
    "if": "write anyOf instead",
    "not": "list what is allowed instead",
    "uniqueItems": "leave it out and check the output",
}


def parse_schema(text: str) -> dict[str, Any]:
    """Text to a schema, which must be an object. Raises `ValueError` that says what is wrong."""
    try:
        schema = json.loads(text, parse_constant=_no_constant, parse_float=_finite)
    except RecursionError as error:
        raise ValueError(f"it is nested deeper than the {MAX_DEPTH} levels that are allowed") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error}") from error
    if not isinstance(schema, dict):
        raise ValueError(f"a schema must be a JSON object, got {json.dumps(schema)[:40]}")
    return schema


def check_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without keywords that say nothing. Raises `ValueError` that names the place and what is wrong.

    Refused: keywords that are not known (annotations of one's own begin with `x-`) or cannot be held, and what is
    beyond the limits of this module.
    """
    _check_sizes(schema)
    cleaned: dict[str, Any] = _clean(schema, "#")
    return cleaned


def _no_constant(name: str) -> float:
    raise ValueError(f"it is not JSON: {name} is no JSON number")


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"the number {digits[:40]} is too large")
    return number


def _clean(schema: Any, path: str) -> Any:
    """A copy of the (sub)schema; whatever is malformed is left for the library, which names it."""
    if not isinstance(schema, dict):
        return schema
    out: dict[str, Any] = {}
    for key, value in schema.items():
        here = f"{path}/{key}"
        if key.startswith("x-"):
            continue
        if key in NO_OPS and value is NO_OPS[key]:
            continue
        if key not in KNOWN:
            hint = HINTS.get(key, "an annotation of your own must begin with x-")
            raise ValueError(f"the keyword {key!r} at {here} is not supported: {hint}")
        if key == "$id" and path != "#":
            raise ValueError(f"$id at {here} is not supported: only the schema itself may have one")
        if key in SUBSCHEMA_LISTS and isinstance(value, list):
            out[key] = [_clean(item, f"{here}/{i}") for i, item in enumerate(value)]
        elif key in SUBSCHEMA_MAPS and isinstance(value, dict):
            out[key] = {name: _clean(item, f"{here}/{name}") for name, item in value.items()}
        elif key in SUBSCHEMA:
            out[key] = _clean(value, here)
        else:
            out[key] = value
    return out


def _check_sizes(schema: dict[str, Any]) -> None:
    properties = patterns = 0
    multiples: list[Fraction] = []
    for node in _objects(schema):
        own = node.get("properties")
        if isinstance(own, dict):
            properties += len(own)
            required = node.get("required")
            names = {n for n in required if isinstance(n, str)} if isinstance(required, list) else set()
            optional = len(own) - len(own.keys() & names)
            if optional > MAX_OPTIONAL_PROPERTIES:
                raise ValueError(
                    f"an object has {optional} optional properties; at most {MAX_OPTIONAL_PROPERTIES} are allowed"
                )
        if isinstance(node.get("patternProperties"), dict):
            patterns += len(node["patternProperties"])
        multiple = node.get("multipleOf")
        if isinstance(multiple, int | float) and not isinstance(multiple, bool) and multiple > 0:
            multiples.append(Fraction(repr(multiple)))
        _check_integers(node)
    if properties > MAX_PROPERTIES:
        raise ValueError(f"it has {properties} properties; at most {MAX_PROPERTIES} are allowed")
    if patterns > MAX_PATTERN_PROPERTIES:
        raise ValueError(f"it has {patterns} patternProperties; at most {MAX_PATTERN_PROPERTIES} are allowed")
    _check_multiples(multiples)


def _check_multiples(multiples: list[Fraction]) -> None:
    unit = math.lcm(*(m.denominator for m in multiples))
    steps = 1
    for multiple in multiples:
        steps = math.lcm(steps, int(multiple * unit))
        for prime in (2, 5):  # these are read off the last digits, and cost nothing
            while steps % prime == 0:
                steps //= prime
        if steps > MAX_MULTIPLE:
            raise ValueError(
                f"the least common multiple of all multipleOf, without factors 2 and 5, is {steps}; at most "
                f"{MAX_MULTIPLE} is allowed"
            )


def _check_integers(node: dict[str, Any]) -> None:
    bounds = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "const")
    enum = node.get("enum")
    for value in (*(node.get(key) for key in bounds), *(enum if isinstance(enum, list) else ())):
        if isinstance(value, int) and abs(value) > MAX_INTEGER:
            raise ValueError(f"{value} is beyond 2**53, up to which numbers are exact")


def _objects(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every object in the schema, wherever it is: a $ref may point anywhere. Raises `ValueError` at `MAX_DEPTH`."""
    level: list[Any] = [schema]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for node in level:
            if isinstance(node, dict):
                yield node
                below += node.values()
            elif isinstance(node, list):
                below += node
        level = [node for node in below if isinstance(node, dict | list)]
        if not level:
            return
    raise ValueError(f"it is nested deeper than the {MAX_DEPTH} levels that are allowed")
