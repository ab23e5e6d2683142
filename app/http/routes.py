"""The HTTP routes, as an ASGI application around the `Catalog` of models."""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from app import __version__, metrics
from app.http.doors import Doors
from app.http.streaming import Endpoint, EventStream, Handler, JsonResponse, error_response
from app.off_loop import off_loop
from app.openai.errors import ApiError, EngineFault
from app.openai.openapi import docs_page, openapi
from app.openai.requests import (
    parse_chat,
    parse_completion,
    parse_detokenize,
    parse_load_adapter,
    parse_tokenize,
    parse_unload_adapter,
)
from app.service.answers import Answer
from app.service.catalog import Catalog


def create_app(catalog: Catalog, stream_commit_s: float, doors: Doors | None = None) -> Starlette:
    """stream_commit_s: seconds that a stream's status waits for its first token. doors: open ones by default."""
    description = openapi(catalog.names)

    async def chat(_: Request, body: bytes) -> Response | EventStream:
        request = await off_loop(parse_chat, len(body), body)
        return await send(await catalog.of(request.model).chat(request), request.stream)

    async def complete(_: Request, body: bytes) -> Response | EventStream:
        request = await off_loop(parse_completion, len(body), body)
        return await send(await catalog.of(request.model).complete(request), request.stream)

    async def send(answer: Answer, stream: bool | None) -> Response | EventStream:
        return EventStream(answer.chunks(), stream_commit_s) if stream else JsonResponse(await answer.whole())

    async def tokenize(_: Request, body: bytes) -> Response:
        request = await off_loop(parse_tokenize, len(body), body)
        return JsonResponse(await catalog.of(request.model).tokenize(request))

    async def detokenize(_: Request, body: bytes) -> Response:
        request = await off_loop(parse_detokenize, len(body), body)
        return JsonResponse(await catalog.of(request.model).detokenize(request))

    async def load_adapter(_: Request, body: bytes) -> Response:
        return PlainTextResponse(await catalog.load_adapter(parse_load_adapter(body)))

    async def unload_adapter(_: Request, body: bytes) -> Response:
        return PlainTextResponse(await catalog.unload_adapter(parse_unload_adapter(body)))

    async def models(_: Request, __: bytes) -> Response:
        return JsonResponse(catalog.cards())

    async def model(request: Request, _: bytes) -> Response:
        return JsonResponse(catalog.card(request.path_params["name"]))

    async def health(_: Request, __: bytes) -> Response:
        try:
            await catalog.check_health()
        except EngineFault as error:
            raise ApiError(503, str(error), code="unhealthy", headers={"Retry-After": "5"}) from error
        return JsonResponse({"status": "ok"})

    async def show_metrics(_: Request, __: bytes) -> Response:
        return Response(await catalog.scrape.text(), media_type=metrics.CONTENT_TYPE)

    async def version(_: Request, __: bytes) -> Response:
        return JsonResponse({"version": __version__})

    async def describe(_: Request, __: bytes) -> Response:
        return JsonResponse(description)

    async def docs(_: Request, __: bytes) -> Response:
        return HTMLResponse(docs_page(description))

    def route(method: str, path: str, handler: Handler) -> Route:
        return Route(path, Endpoint(handler), methods=[method])

    return Starlette(
        routes=[
            route("POST", "/v1/chat/completions", chat),
            route("POST", "/v1/completions", complete),
            route("GET", "/v1/models", models),
            route("GET", "/v1/models/{name:path}", model),
            route("POST", "/v1/load_lora_adapter", load_adapter),
            route("POST", "/v1/unload_lora_adapter", unload_adapter),
            route("POST", "/tokenize", tokenize),
            route("POST", "/detokenize", detokenize),
            route("GET", "/version", version),
            route("GET", "/health", health),
            route("GET", "/metrics", show_metrics),
            route("GET", "/openapi.json", describe),
            route("GET", "/docs", docs),
        ],
        middleware=(doors or Doors()).middleware(),
        exception_handlers={HTTPException: _routing_error},
    )


async def _routing_error(request: Request, error: Exception) -> Response:
    """Starlette's own 404 and 405 in OpenAI's body."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    if error.status_code == 405:
        told = ApiError(
            405, f"{where}: this path takes another method.", code="method_not_allowed", headers=error.headers
        )
    else:
        told = ApiError(error.status_code, f"{where}: there is no such path.", code="not_found")
    return error_response(told)
