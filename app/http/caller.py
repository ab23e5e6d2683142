"""Who asks: known at the door, needed where requests queue and where they are routed.

It travels as a context variable, which the tasks and generators of a request inherit, so that nothing in between has to
hand it on.
"""

from contextvars import ContextVar
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

SESSION_HEADER = "x-session-id"
MAX_SESSION_LENGTH = 256

TENANT = "nanoserve.tenant"
"""Key of the ASGI scope under which the check of API keys leaves whose key it was."""


@dataclass(frozen=True, slots=True)
class Caller:
    """tenant: those of one API key; one for all where there are no keys. session: the client's name for what belongs
    together, such as a conversation."""

    tenant: str = ""
    session: str | None = None


_caller: ContextVar[Caller] = ContextVar("caller", default=Caller())  # noqa: B039 - it is frozen


def current_caller() -> Caller:
    return _caller.get()


class CallerContext:
    """Sets the caller for all that a request does."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            session = Headers(scope=scope).get(SESSION_HEADER)
            _caller.set(Caller(scope.get(TENANT, ""), session[:MAX_SESSION_LENGTH] if session else None))
        await self._app(scope, receive, send)
