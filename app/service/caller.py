"""Who asks: known at the door (`app.http.doors`), needed where requests queue and where they are routed.

It travels as a context variable, which the tasks and generators of a request inherit, so that nothing in between has to
hand it on.
"""

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Caller:
    """tenant: those of one API key; one for all where there are no keys. session: the client's name for what belongs
    together, such as a conversation."""

    tenant: str = ""
    session: str | None = None


_caller: ContextVar[Caller] = ContextVar("caller", default=Caller())  # noqa: B039 - it is frozen


def current_caller() -> Caller:
    return _caller.get()


def set_caller(caller: Caller) -> None:
    """For all that the request under way does."""
    _caller.set(caller)
