"""The HTTP routes, as an ASGI application around a `Service`."""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app import metrics
from app.openai.errors import ApiError, EngineFault
from app.openai.requests import parse_chat, parse_completion
from app.service import Service
from app.streaming import Endpoint, EventStream, Handler, JsonResponse, error_response
from app.text import off_loop


def create_app(service: Service, stream_commit_s: float) -> Starlette:
    """stream_commit_s: seconds that a stream's status waits for its first token."""

    async def chat(_: Request, body: bytes) -> Response | EventStream:
        request = await off_loop(parse_chat, len(body), body)
        answer = await service.chat(request)
        if request.stream:
            return EventStream(answer.chunks(), stream_commit_s)
        return JsonResponse(await answer.whole())

    async def complete(_: Request, body: bytes) -> Response | EventStream:
        request = await off_loop(parse_completion, len(body), body)
        answer = await service.complete(request)
        if request.stream:
            return EventStream(answer.chunks(), stream_commit_s)
        return JsonResponse(await answer.whole())

    async def models(_: Request, __: bytes) -> Response:
        return JsonResponse(service.models())

    async def model(request: Request, _: bytes) -> Response:
        return JsonResponse(service.model(request.path_params["name"]))

    async def health(_: Request, __: bytes) -> Response:
        try:
            await service.client.check_health()
        except EngineFault as error:
            raise ApiError(503, str(error), code="unhealthy", headers={"Retry-After": "5"}) from error
        return JsonResponse({"status": "ok"})

    async def show_metrics(_: Request, __: bytes) -> Response:
        admission = service.admission
        text = metrics.render(service.name, await service.client.stats(), admission.outstanding, admission.waiting)
        return Response(text, media_type=metrics.CONTENT_TYPE)

    def route(method: str, path: str, handler: Handler) -> Route:
        return Route(path, Endpoint(handler), methods=[method])

    return Starlette(
        routes=[
            route("POST", "/v1/chat/completions", chat),
            route("POST", "/v1/completions", complete),
            route("GET", "/v1/models", models),
            route("GET", "/v1/models/{name:path}", model),
            route("GET", "/health", health),
            route("GET", "/metrics", show_metrics),
        ],
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
