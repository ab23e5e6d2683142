"""The tools of a chat request: which are offered, which must be called, and the JSON Schema of such a call."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, WithJsonSchema

from app.openai.closed_schema import Schema, closed
from app.openai.model import RequestModel

MAX_TOOLS = 128

_NO_PARAMETERS: Schema = {"type": "object", "properties": {}, "additionalProperties": False}


class FunctionDefinition(RequestModel):
    """strict: kept where a call is demanded (`required`, or a named one), which the schema constrains anyway."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.\-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def arguments_schema(self) -> Schema:
        """Arguments are an object, whether the schema says so or not, of the properties that it names."""
        if self.parameters is None:
            return _NO_PARAMETERS
        return closed({"type": "object"} | self.parameters)


class Tool(RequestModel):
    type: Literal["function"]
    function: FunctionDefinition

    def for_template(self) -> dict[str, Any]:
        """As templates know it: always with a description and parameters, which many of them write unasked."""
        function = self.function
        return {
            "type": "function",
            "function": {
                "name": function.name,
                "description": function.description or "",
                "parameters": function.parameters or {"type": "object", "properties": {}},
            },
        }


class FunctionName(RequestModel):
    name: str


class NamedChoice(RequestModel):
    """The one function that must be called."""

    type: Literal["function"]
    function: FunctionName


_CHOICES = ("none", "auto", "required")

_NAMED_CHOICE = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    },
    "required": ["type", "function"],
}


def _choice(given: Any) -> Any:
    if given in _CHOICES:
        return given
    function = given.get("function") if isinstance(given, dict) and given.get("type") == "function" else None
    if isinstance(function, dict) and isinstance(function.get("name"), str):
        return NamedChoice(type="function", function=FunctionName(name=function["name"]))
    raise ValueError("must be 'none', 'auto', 'required' or {'type': 'function', 'function': {'name': ...}}")


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedChoice,
    PlainValidator(_choice),
    WithJsonSchema({"anyOf": [{"enum": list(_CHOICES)}, _NAMED_CHOICE]}),
]


def calls_schema(tools: Sequence[Tool], at_most_one: bool) -> Schema:
    """A list of at least one call, each `{"name": ..., "parameters": ...}` of one of `tools`.

    The parameters' own schemas stand under `$defs`, with their references turned to where they are now.
    """
    defs = {}
    calls = []
    for tool in tools:
        name = tool.function.name
        home = f"#/$defs/{name}"
        defs[name] = _moved(tool.function.arguments_schema(), home)
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": name}, "parameters": {"$ref": home}},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    schema: Schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls}, "$defs": defs}
    return schema | {"maxItems": 1} if at_most_one else schema


def _moved(schema: Any, home: str) -> Any:
    """`schema` with its local references under `home`. Nothing else in a schema is named `$ref`, but in `enum`,
    `const` and the like, which are left as they are."""
    if isinstance(schema, list):
        return [_moved(item, home) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and value.startswith("#"):
            moved[key] = home + value[1:]
        elif key in ("const", "enum", "default", "examples"):
            moved[key] = value
        else:
            moved[key] = _moved(value, home)
    return moved
