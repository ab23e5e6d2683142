"""OpenAI's error body, and which of our errors becomes which status."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from engine.errors import ContextLengthError, EngineDeadError, InvalidRequestError

CONTEXT_LENGTH = "context_length_exceeded"

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An answer that is not 200: status, headers and what stands in OpenAI's error body."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class EngineFault(Exception):
    """The engine could not finish a request that it had taken: a step failed, or its replica is gone."""


def to_api_error(error: Exception) -> ApiError:
    """What a client is told of `error`. The text of an unforeseen one stays in the log."""
    match error:
        case ApiError():
            return error
        case ContextLengthError():
            return ApiError(400, str(error), param=error.param, code=CONTEXT_LENGTH)
        case InvalidRequestError():
            return ApiError(400, str(error), param=error.param, code="invalid_value")
        case EngineFault():
            return ApiError(500, str(error), code="engine_error")
        case EngineDeadError():
            return ApiError(
                503, "The engine is being replaced; try again.", code="engine_dead", headers={"Retry-After": "5"}
            )
    return ApiError(500, "The server met an error of its own; its log has the details.", code="internal_error")


def from_validation_error(error: ValidationError) -> ApiError:
    """A 400 that names the first field that is wrong, what is allowed and what was given."""
    first = error.errors(include_url=False)[0]
    param = _path(first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        return ApiError(400, f"{param} is required.", param=param, code="missing_required_parameter")
    if not param:  # a rule about several fields together, which may name one
        cause = first.get("ctx", {}).get("error")
        named = cause.param if isinstance(cause, InvalidRequestError) else None
        return ApiError(400, message, param=named, code="invalid_value")
    given = repr(first.get("input"))
    given = given if len(given) <= 80 else given[:77] + "..."
    return ApiError(400, f"{param}: {message} (got {given})", param=param, code="invalid_value")


def _path(loc: tuple[int | str, ...]) -> str:
    """`("messages", 0, "content")` as `messages[0].content`."""
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path
