"""ASGI endpoints whose work ends with the client, and server-sent events that tell the truth in their status."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from app.admission import QueueFullError
from app.openai.errors import ApiError, to_api_error
from app.openai.responses import DONE, KEEP_ALIVE, Body, event, to_json

MAX_BODY_BYTES = 32 * 2**20
BODY_S = 60.0
"""Seconds that a body may take to come."""

KEEP_ALIVE_S = 5.0
"""Longest silence on a stream; proxies on the way close one that is silent for long."""

UNREAD_S = 60.0
"""Seconds that a client may read nothing of what it is sent, before its stream ends and its place is another's."""

logger = logging.getLogger("ray.serve")


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content)


class EventStream:
    """Chunks as server-sent events, with `data: [DONE]` after the last.

    The status waits for the first chunk, or for `commit_s` seconds: a failure until then is a real 4xx or 5xx, one
    after it an `error` event that ends the stream.
    """

    def __init__(self, chunks: AsyncGenerator[Body | bytes, None], commit_s: float) -> None:
        self._chunks = chunks
        self._commit_s = commit_s
        self._sent_at = 0.0
        self._untaken = False
        self._cut_off = False

    async def __call__(self, send: Send) -> None:
        first = asyncio.ensure_future(anext(self._chunks, None))
        try:
            done, _ = await asyncio.wait({first}, timeout=self._commit_s)
            if done:
                first.result()
            await send({"type": "http.response.start", "status": 200, "headers": _EVENT_STREAM_HEADERS})
            sender = asyncio.current_task()
            assert sender is not None
            keep_alive = asyncio.ensure_future(self._keep_alive(send, sender))
            try:
                await self._send_chunks(first, send)
            except asyncio.CancelledError:
                if not self._cut_off:
                    raise
                sender.uncancel()
                logger.warning("A stream is cut off: its client has read nothing for %.0f s.", UNREAD_S)
                return  # and the connection with it, since the answer is not whole
            finally:
                keep_alive.cancel()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            first.cancel()
            if first.done():  # else its own cancellation closes the chunks
                await self._chunks.aclose()

    async def _send_chunks(self, first: "asyncio.Future[Body | bytes | None]", send: Send) -> None:
        try:
            chunk = await first
            while chunk is not None:
                await self._send(chunk if isinstance(chunk, bytes) else event(chunk), send)
                chunk = await anext(self._chunks, None)
        except Exception as error:
            await self._send(event(_logged(error).body(), "error"), send)
        else:
            await self._send(DONE, send)

    async def _send(self, data: bytes, send: Send) -> None:
        self._sent_at = time.monotonic()
        self._untaken = True
        await send({"type": "http.response.body", "body": data, "more_body": True})
        self._untaken = False

    async def _keep_alive(self, send: Send, sender: "asyncio.Task[None]") -> None:
        """Break silences, and cancel `sender` when nobody reads.

        A task for the stream, not a timer for each token. What it sends is a whole comment, so it may come between
        any two events."""
        while True:
            silence = time.monotonic() - self._sent_at
            if self._untaken and silence >= UNREAD_S:
                break
            if not self._untaken and silence >= KEEP_ALIVE_S:
                try:
                    await asyncio.wait_for(self._send(KEEP_ALIVE, send), UNREAD_S)
                except TimeoutError:
                    break
            else:
                await asyncio.sleep(min(1.0, UNREAD_S - silence) if self._untaken else KEEP_ALIVE_S - silence)
        self._cut_off = True
        sender.cancel()


_EVENT_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx passes events on as they come
]

Handler = Callable[[Request, bytes], Awaitable[Response | EventStream]]


class Endpoint:
    """Runs a handler and sends its answer, in a task that is cancelled when the client leaves.

    Cancelling aborts what the handler has on the engine. Errors become OpenAI's body.
    """

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            body = await _read_body(request)
        except ClientDisconnect:
            return
        except ApiError as error:
            await error_response(error)(scope, receive, send)
            return
        work = asyncio.ensure_future(self._answer(request, body, send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            work.cancel()
            gone.cancel()

    async def _answer(self, request: Request, body: bytes, send: Send) -> None:
        started = False

        async def tracked(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            answer = await self._handler(request, body)
            if isinstance(answer, EventStream):
                await answer(tracked)
            else:
                await answer(request.scope, request.receive, tracked)
        except Exception as error:
            # The error itself gets no name here: it would keep this frame, with the body, until a collection.
            response = error_response(_logged(error))
            if not started:  # else the connection broke, and there is nobody to tell
                await response(request.scope, request.receive, send)


def error_response(error: ApiError) -> Response:
    return JsonResponse(error.body(), status_code=error.status, headers=error.headers)


def _logged(error: Exception) -> ApiError:
    """The error as a client sees it; the log gets what a client does not."""
    if isinstance(error, QueueFullError):
        headers = {"Retry-After": str(error.retry_after_s)}
        return ApiError(429, str(error), code="server_overloaded", headers=headers)
    told = to_api_error(error)
    if told.status >= 500:
        logger.error("A request failed: %s", error, exc_info=error)
    return told


async def _read_body(request: Request) -> bytes:
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                size += len(part)
                if size > MAX_BODY_BYTES:
                    raise ApiError(413, f"The body may have at most {MAX_BODY_BYTES} bytes.", code="body_too_large")
                parts.append(part)
    except TimeoutError:
        message = f"The body did not come within {BODY_S:.0f} s: {size} bytes did."
        raise ApiError(408, message, code="body_too_slow", headers={"Connection": "close"}) from None
    return b"".join(parts)


async def _disconnected(receive: Receive) -> None:
    """Return when the client has left."""
    message: Message = {"type": ""}
    while message["type"] != "http.disconnect":
        message = await receive()
