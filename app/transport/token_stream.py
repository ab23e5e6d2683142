"""The ingress's end of one submission: tokens as they come, how it ended, or why nothing more comes."""

import asyncio
from collections.abc import Callable
from typing import Any

from app.engine_client import CarrierLost, Delivery, Placed, ReplicaLost
from app.openai.errors import EngineFault
from engine.outputs import Finished, FinishReason, TokenLogprobs

MAX_UNREAD_TOKENS = 8192
"""Tokens of one request that may wait for its client; one who stops reading is cut off here."""


class ServeTokenStream:
    """A submission over a Serve handle; see `TokenStream`.

    ended: whether nothing is left to abort. placed: where it is, once that is known. cancelled: whether its call is.
    """

    __slots__ = (
        "_error",
        "_finished",
        "_on_close",
        "_waiter",
        "cached_tokens",
        "cancelled",
        "closed",
        "ended",
        "logprobs",
        "placed",
        "prompt_logprobs",
        "request_id",
        "response",
        "token_ids",
    )

    def __init__(self, request_id: str, response: Any, on_close: "Callable[[ServeTokenStream], None]") -> None:
        self.request_id = request_id
        self.response = response
        self.placed: Placed | None = None
        self.closed = False
        self.ended = False
        self.cancelled = False
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self.cached_tokens = 0
        self._finished: Finished | None = None
        self._error: Exception | None = None
        self._on_close = on_close
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> "ServeTokenStream":
        return self

    async def __anext__(self) -> Delivery:
        while not self.token_ids and self._finished is None:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        token_ids, self.token_ids = self.token_ids, []
        finished, self._finished = self._finished, None
        if finished is not None:
            self._error = StopAsyncIteration()
        if not self.logprobs and self.prompt_logprobs is None and not self.cached_tokens:
            return Delivery(token_ids, finished)
        logprobs, self.logprobs = self.logprobs, []
        prompt_logprobs, self.prompt_logprobs = self.prompt_logprobs, None
        cached_tokens, self.cached_tokens = self.cached_tokens, 0
        return Delivery(token_ids, finished, logprobs, prompt_logprobs, cached_tokens)

    def push(self, token_id: int) -> None:
        if self._error is None:
            self.token_ids.append(token_id)
            self._wake()
            if len(self.token_ids) > MAX_UNREAD_TOKENS:
                self.fail(EngineFault("The client does not read what it is sent."), ended=False)
                self.close()

    def end(self, finished: Finished) -> None:
        """How it ended. That nobody here asked for it is a loss, and none if the engine lost nothing by it."""
        if (loss := loss_by(finished)) is not None:
            self.fail(loss)
        elif self._error is None:
            self.ended = True
            self._finished = finished
            self._wake()

    def fail(self, error: Exception, ended: bool = True) -> None:
        """No more comes; what has come is still delivered. ended: whether nothing is left to abort."""
        if not self.ended and self._error is None:
            self.ended = ended
            self._error = error
            self._wake()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._on_close(self)

    def _wake(self) -> None:
        if self._waiter is not None:
            if not self._waiter.done():
                self._waiter.set_result(None)
            self._waiter = None


def engine_gone() -> EngineFault:
    return EngineFault("No engine is left for the request: the application was taken away, or its engine cannot start.")


def loss_by(finished: Finished) -> ReplicaLost | None:
    """What a request has lost by an end that nobody here asked for; None for any other end. An engine that lives aborts
    it for its carrier alone."""
    if finished.lost:
        return replica_lost("closed")
    return CarrierLost("The call that carried its tokens has ended.") if finished.reason is FinishReason.ABORT else None


def replica_lost(why: str) -> ReplicaLost:
    return ReplicaLost(f"The engine replica was lost ({why}).")
