"""Who may come in, and as whom: API keys, requests of one key at once, sessions, and pages of other origins."""

import hmac
from collections import Counter
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from app.http.streaming import error_response
from app.openai.errors import ApiError
from app.service.caller import Caller, set_caller
from engine.errors import ConfigError

OPEN_PATHS = frozenset({"/health"})
"""Asked by what watches over the server, which has no key."""

BUSY_RETRY_AFTER_S = 1

SESSION_HEADER = "x-session-id"
MAX_SESSION_LENGTH = 256

TENANT = "nanoserve.tenant"
"""Key of the ASGI scope under which `KeyCheck` leaves whose key it was."""


class Doors:
    """keys: none lets everybody in. allow_origins: none keeps the pages of all others out."""

    def __init__(
        self, keys: Sequence[str] = (), max_requests_per_key: int = 256, allow_origins: Sequence[str] = ()
    ) -> None:
        self.keys = KeyRing(keys, max_requests_per_key)
        self._allow_origins = list(allow_origins)

    def middleware(self) -> list[Middleware]:
        """Outermost first: an answer that refuses a page's request must be readable by that page."""
        layers = []
        if self._allow_origins:
            layers.append(
                Middleware(
                    CORSMiddleware,
                    allow_origins=self._allow_origins,
                    allow_methods=["GET", "POST"],
                    allow_headers=["*"],
                    expose_headers=["Retry-After"],
                )
            )
        if self.keys.any:
            layers.append(Middleware(KeyCheck, keys=self.keys))
        return [*layers, Middleware(CallerContext)]


class KeyRing:
    """The keys, of which it keeps only digests, and how many requests of one there may be at once."""

    def __init__(self, keys: Sequence[str], max_requests: int) -> None:
        self.change(keys, max_requests)

    def change(self, keys: Sequence[str], max_requests: int) -> None:
        """Also while requests run, which end as they would have."""
        self.digests = [sha256(key.encode()).digest() for key in keys]
        self.max_requests = max_requests

    @property
    def any(self) -> bool:
        return bool(self.digests)


class KeyCheck:
    """Lets requests with a key through, so many of each at once."""

    def __init__(self, app: ASGIApp, keys: KeyRing) -> None:
        self._app = app
        self._keys = keys
        self._running: Counter[bytes] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        try:
            key = self._key(Headers(scope=scope).get("authorization"))
        except ApiError as error:
            await error_response(error)(scope, receive, send)
            return
        scope[TENANT] = key.hex()[:16]
        self._running[key] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._running[key] -= 1
            if not self._running[key]:
                del self._running[key]

    def _key(self, authorization: str | None) -> bytes:
        """The digest of the key. Raises `ApiError` 401 or 429."""
        scheme, _, given = (authorization or "").partition(" ")
        digest = sha256(given.strip().encode()).digest()
        # Digests, and all of them: the time taken says nothing of how much of a key was right, or which one.
        matches = [hmac.compare_digest(digest, known) for known in self._keys.digests]
        if scheme.lower() != "bearer" or True not in matches:
            message = (
                "This server needs an API key: send it as 'Authorization: Bearer KEY'."
                if not given
                else "The API key is not one of this server's."
            )
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        if self._running[digest] >= self._keys.max_requests:
            most = self._keys.max_requests
            raise ApiError(
                429,
                f"This API key has {most} requests running, which is as many as it may: wait for one.",
                code="too_many_requests",
                headers={"Retry-After": str(BUSY_RETRY_AFTER_S)},
            )
        return digest


class CallerContext:
    """Sets the caller for all that a request does."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            session = Headers(scope=scope).get(SESSION_HEADER)
            set_caller(Caller(scope.get(TENANT, ""), session[:MAX_SESSION_LENGTH] if session else None))
        await self._app(scope, receive, send)


def read_keys(keys: Sequence[str], file: str | None) -> list[str]:
    """`keys` and those of `file`, one a line. Raises `ConfigError` if there is such a file with none to read."""
    return _checked([*keys, *([] if file is None else _keys_of(file))])


def _checked(keys: Sequence[str]) -> list[str]:
    """Without doubles. The message names no key: it may go to a log."""
    if not all(key.isascii() and key.isprintable() and " " not in key for key in keys):
        raise ConfigError("api_keys: a key must be printable ASCII characters without spaces, which one of them is not")
    return list(dict.fromkeys(keys))


def _keys_of(file: str) -> list[str]:
    try:
        lines = [line.strip() for line in Path(file).read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"api_keys_file: {file} cannot be read ({type(error).__name__})") from error
    found = [line for line in lines if line and not line.startswith("#")]
    if not found:
        raise ConfigError(f"api_keys_file: {file} has no key in it")
    return found
