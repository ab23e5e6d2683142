"""The description of the API: requests from the models that validate them, answers as they are made."""

import html
import json
from collections.abc import Sequence
from typing import Any

from pydantic.json_schema import models_json_schema

from app import __version__
from app.openai.adapters import LoadAdapterRequest, UnloadAdapterRequest
from app.openai.requests import ChatRequest, CompletionRequest
from app.openai.tokenization import DetokenizeRequest, TokenizeRequest
from app.openai.unsupported import CHAT, COMPLETIONS

Body = dict[str, Any]

_REQUESTS = (
    ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest, LoadAdapterRequest, UnloadAdapterRequest
)  # fmt: skip


def openapi(models: Sequence[str]) -> Body:
    """An OpenAPI 3.1 document. models: those that are served."""
    _, definitions = models_json_schema(
        [(request, "validation") for request in _REQUESTS], ref_template="#/components/schemas/{model}"
    )
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "nanoserve",
            "version": __version__,
            "description": f"OpenAI's API for {', '.join(map(repr, models))}. Fields that are not known are ignored.",
        },
        "paths": {
            "/v1/chat/completions": {"post": _generation("chat", ChatRequest, "ChatCompletion", CHAT)},
            "/v1/completions": {"post": _generation("complete", CompletionRequest, "Completion", COMPLETIONS)},
            "/v1/models": {"get": _operation("list_models", "The served models and their adapters", "ModelList")},
            "/v1/models/{name}": {"get": _operation("get_model", "One model", "Model") | {"parameters": [_NAME]}},
            "/v1/load_lora_adapter": {
                "post": _text(
                    "load_adapter", "Serve a LoRA adapter by a name of its own", "text/plain", LoadAdapterRequest
                )
            },
            "/v1/unload_lora_adapter": {
                "post": _text("unload_adapter", "Serve it no more", "text/plain", UnloadAdapterRequest)
            },
            "/tokenize": {"post": _operation("tokenize", "Text or messages to token ids", "Tokens", TokenizeRequest)},
            "/detokenize": {"post": _operation("detokenize", "Token ids to text", "Text", DetokenizeRequest)},
            "/version": {"get": _operation("version", "The server's version", "Version")},
            "/health": {"get": _operation("health", "200 while the engine serves", "Health") | {"security": []}},
            "/metrics": {"get": _text("metrics", "The engine's state for Prometheus", "text/plain")},
            "/openapi.json": {"get": _operation("openapi", "This document", "Document")},
            "/docs": {"get": _text("docs", "This document for people", "text/html")},
        },
        "components": {
            "schemas": definitions["$defs"] | _ANSWERS,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def docs_page(document: Body) -> str:
    """The document as one page that needs nothing else."""
    rows = [
        f"<tr><td>{method.upper()}</td><td>{html.escape(path)}</td><td>{html.escape(operation['summary'])}</td></tr>"
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    ]
    text = html.escape(json.dumps(document, indent=2, ensure_ascii=False))
    return _PAGE.format(description=html.escape(document["info"]["description"]), rows="".join(rows), document=text)


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>nanoserve</title>
<style>body{{font:15px sans-serif;margin:2em;max-width:70em}}td{{padding:.2em 1em .2em 0}}
pre{{background:#f4f4f4;padding:1em;overflow:auto}}</style></head>
<body><h1>nanoserve</h1><p>{description}</p><table>{rows}</table>
<h2>OpenAPI</h2><p>The same as JSON: <a href="openapi.json">openapi.json</a></p><pre>{document}</pre></body></html>
"""

_NAME = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}


def _ref(name: str) -> Body:
    return {"$ref": f"#/components/schemas/{name}"}


def _content(schema: Body, media_type: str = "application/json") -> Body:
    return {media_type: {"schema": schema}}


def _errors() -> Body:
    return {
        status: {"description": what, "content": _content(_ref("Error"))}
        for status, what in (("4XX", "The request is refused"), ("5XX", "The server cannot serve it"))
    }


def _operation(name: str, summary: str, answer: str, request: type | None = None) -> Body:
    return _described(name, summary, _content(_ref(answer)), request)


def _text(name: str, summary: str, media_type: str, request: type | None = None) -> Body:
    return _described(name, summary, _content({"type": "string"}, media_type), request)


def _described(name: str, summary: str, answer: Body, request: type | None) -> Body:
    operation: Body = {
        "operationId": name,
        "summary": summary,
        "responses": {"200": {"description": "Done", "content": answer}} | _errors(),
    }
    if request is not None:
        operation["requestBody"] = {"required": True, "content": _content(_ref(request.__name__))}
    return operation


def _generation(name: str, request: type, answer: str, unsupported: Body) -> Body:
    operation = _operation(name, "Text for a chat" if name == "chat" else "Text after a prompt", answer, request)
    operation["description"] = (
        "With `stream`, server-sent events: chunks, an `error` event if it fails, `data: [DONE]` at the end. "
        f"Answered 400, unless they ask for nothing: {', '.join(sorted(unsupported))}."
    )
    operation["responses"]["200"]["content"] |= _content({"type": "string"}, "text/event-stream")
    return operation


def _object(required: str, **properties: Any) -> Body:
    """An object of which the fields named in `required` are always there."""
    return {"type": "object", "properties": properties, "required": required.split()}


def _list(items: Body) -> Body:
    return {"type": "array", "items": items}


def _or_null(schema: Body) -> Body:
    return {"anyOf": [schema, {"type": "null"}]}


_STRING, _INTEGER, _NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
_STRING_OR_NULL = {"type": ["string", "null"]}
_IDS = _list(_INTEGER)
_TOKEN = {"token": _STRING, "logprob": _NUMBER, "bytes": _or_null(_IDS)}
_PROMPT_LOGPROBS = _list(
    _or_null({"type": "object", "additionalProperties": _object("logprob rank", logprob=_NUMBER, rank=_INTEGER)})
)

_ANSWERS: Body = {
    "Error": _object(
        "error",
        error=_object(
            "message type param code", message=_STRING, type=_STRING, param=_STRING_OR_NULL, code=_STRING_OR_NULL
        ),
    ),
    "Usage": _object(
        "prompt_tokens completion_tokens total_tokens prompt_tokens_details",
        prompt_tokens=_INTEGER,
        completion_tokens=_INTEGER,
        total_tokens=_INTEGER,
        prompt_tokens_details=_object("cached_tokens", cached_tokens=_INTEGER),
    ),
    "ToolCall": _object(
        "id type function",
        id=_STRING,
        type={"const": "function"},
        function=_object("name arguments", name=_STRING, arguments=_STRING),
    ),
    "ChatLogprobs": _object(
        "content refusal",
        content=_list(
            _object(
                "token logprob bytes top_logprobs",
                **_TOKEN,
                top_logprobs=_list(_object("token logprob bytes", **_TOKEN)),
            )
        ),
        refusal={"type": "null"},
    ),
    "ChatCompletion": _object(
        "id object created model choices usage",
        id=_STRING,
        object={"const": "chat.completion"},
        created=_INTEGER,
        model=_STRING,
        choices=_list(
            _object(
                "index message logprobs finish_reason",
                index=_INTEGER,
                message=_object(
                    "role content refusal",
                    role={"const": "assistant"},
                    content=_STRING_OR_NULL,
                    refusal={"type": "null"},
                    reasoning_content=_STRING,
                    tool_calls=_list(_ref("ToolCall")),
                ),
                logprobs=_or_null(_ref("ChatLogprobs")),
                finish_reason={"enum": ["stop", "length", "tool_calls"]},
                token_ids=_IDS,
            )
        ),
        usage=_ref("Usage"),
        prompt_token_ids=_IDS,
        prompt_logprobs=_PROMPT_LOGPROBS,
    ),
    "Completion": _object(
        "id object created model choices usage",
        id=_STRING,
        object={"const": "text_completion"},
        created=_INTEGER,
        model=_STRING,
        choices=_list(
            _object(
                "index text logprobs finish_reason",
                index=_INTEGER,
                text=_STRING,
                logprobs=_or_null(
                    _object(
                        "tokens token_logprobs top_logprobs text_offset",
                        tokens=_list(_STRING),
                        token_logprobs=_list({"type": ["number", "null"]}),
                        top_logprobs=_list(_or_null({"type": "object", "additionalProperties": _NUMBER})),
                        text_offset=_IDS,
                    )
                ),
                finish_reason={"enum": ["stop", "length"]},
                token_ids=_IDS,
                prompt_token_ids=_IDS,
                prompt_logprobs=_PROMPT_LOGPROBS,
            )
        ),
        usage=_ref("Usage"),
    ),
    "Model": _object(
        "id object created owned_by root parent max_model_len",
        id=_STRING,
        object={"const": "model"},
        created=_INTEGER,
        owned_by=_STRING,
        root=_STRING,
        parent=_STRING_OR_NULL,
        max_model_len=_INTEGER,
    ),
    "ModelList": _object("object data", object={"const": "list"}, data=_list(_ref("Model"))),
    "Tokens": _object(
        "count max_model_len tokens token_strs",
        count=_INTEGER,
        max_model_len=_INTEGER,
        tokens=_IDS,
        token_strs=_or_null(_list(_STRING)),
    ),
    "Text": _object("prompt", prompt=_STRING),
    "Version": _object("version", version=_STRING),
    "Health": _object("status", status={"const": "ok"}),
    "Document": {"type": "object"},
}
