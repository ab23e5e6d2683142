"""The form that an output must have: OpenAI's `response_format`, vLLM's `structured_outputs` and older `guided_*`."""

import difflib
import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from app.openai.closed_schema import closed
from app.openai.model import RequestModel
from engine.errors import InvalidRequestError
from engine.structured.json_schema import parse_schema
from engine.structured.spec import MAX_BYTES, StructuredOutputSpec, validate

MAX_CHOICES = 4096


def _schema_text(schema: Any) -> Any:
    if isinstance(schema, dict):
        return json.dumps(schema, ensure_ascii=False)
    if isinstance(schema, str):
        return schema
    raise ValueError("must be a JSON Schema, as an object or as its text")


JsonSchema = Annotated[
    str, BeforeValidator(_schema_text), WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}]})
]
Choices = Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]


class JsonSchemaFormat(RequestModel):
    """strict: the schema is kept in any case."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[JsonSchema | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(RequestModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


_KINDS = ("json", "json_object", "regex", "choice", "grammar")

_UNSUPPORTED = ("structural_tag", "whitespace_pattern", "disable_fallback", "disable_additional_properties")


class StructuredOutputs(RequestModel):
    """Exactly one of the first five. json: a schema, or its text."""

    json_: Annotated[JsonSchema | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    disable_any_whitespace: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, given: Any) -> Any:
        for name in _UNSUPPORTED:
            if isinstance(given, dict) and given.get(name):
                raise ValueError(f"{name} is not supported by this server")
        if isinstance(given, dict):
            _one_kind(given)
        return given


def _one_kind(given: Mapping[str, Any]) -> None:
    """Raise `ValueError` unless exactly one kind of form is asked for; it tells of misspelt ones, which else nobody
    would."""
    asked = [name for name in _KINDS if given.get(name) not in (None, False)]
    if len(asked) == 1:
        return
    if not asked:
        asked = [_shown(name) for name in given if name not in (*_KINDS, "disable_any_whitespace")]
    instead = f", not {' and '.join(asked)}" if asked else ""
    raise ValueError(f"takes exactly one of {', '.join(_KINDS[:-1])} and {_KINDS[-1]}{instead}")


def _shown(name: str) -> str:
    near = ["json"] if name == "json_schema" else difflib.get_close_matches(name.removeprefix("guided_"), _KINDS, n=1)
    return f"{name[:64]} (did you mean {near[0]}?)" if near else name[:64]


class StructuredFields(RequestModel):
    """The fields of a request that say so; at most one of them may."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None

    def structure(self) -> "Structure | None":
        """What the output is held to, if it is. Raises `InvalidRequestError` if that is two things at once."""
        given = {
            "response_format": _of_format(self.response_format),
            "structured_outputs": _of_outputs(self.structured_outputs),
            "guided_json": _of("json_schema", self.guided_json),
            "guided_regex": _of("regex", self.guided_regex),
            "guided_choice": _of("choice", self.guided_choice and tuple(self.guided_choice)),
            "guided_grammar": _of("grammar", self.guided_grammar),
        }
        asked = {name: options for name, options in given.items() if options is not None}
        if len(asked) > 1:
            names = " and ".join(asked)
            raise InvalidRequestError(f"{names} each say what form the output has: give one of them.", list(asked)[1])
        if not asked:
            return None
        ((name, options),) = asked.items()
        return Structure(name, lambda: options)


class Structure:
    """param: the field of the request that asked. options: makes the fields of a spec, perhaps large ones."""

    def __init__(self, param: str, options: Callable[[], dict[str, Any]]) -> None:
        self.param = param
        self._options = options

    def checked(self) -> StructuredOutputSpec:
        """Takes milliseconds, for large ones hundreds: call it off the event loop.

        Raises `InvalidRequestError` that names the request's own field.
        """
        try:
            options = self._options()
            if isinstance(schema := options.get("json_schema"), str):
                options["json_schema"] = _closed(schema)
            spec = StructuredOutputSpec(**options)
            validate(spec)
        except InvalidRequestError as error:
            error.param = self.param
            raise
        return spec


def _closed(text: str) -> str:
    """The text of a schema with its objects closed; unchanged if it is none, which `validate` tells of."""
    if len(text) > MAX_BYTES:
        return text
    try:
        changed = json.dumps(closed(parse_schema(text)))
    except (ValueError, RecursionError):
        return text
    return changed if len(changed) <= MAX_BYTES else text


def of_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Fields of `StructuredOutputSpec` for a JSON Schema."""
    return {"json_schema": json.dumps(schema, ensure_ascii=False)}


def _of_format(given: ResponseFormat | None) -> dict[str, Any] | None:
    if given is None or given.type == "text":
        return None
    if given.type == "json_schema":
        if given.json_schema is None:
            raise InvalidRequestError("response_format: type 'json_schema' needs a json_schema.", "response_format")
        if given.json_schema.schema_ is not None:
            return _of("json_schema", given.json_schema.schema_)
    return {"json_object": True}


def _of_outputs(given: StructuredOutputs | None) -> dict[str, Any] | None:
    if given is None:
        return None
    options: dict[str, Any] = _of("json_schema", given.json_) or {}
    if given.json_object:
        options["json_object"] = True
    for name in ("regex", "grammar"):
        if (value := getattr(given, name)) is not None:
            options[name] = value
    if given.choice is not None:
        options["choice"] = tuple(given.choice)
    if given.disable_any_whitespace:
        options["disable_any_whitespace"] = True
    return options


def _of(name: str, value: Any) -> dict[str, Any] | None:
    return None if value is None else {name: value}
