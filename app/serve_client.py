"""The engine deployment behind a Serve handle: one call for each request, one of which carries the tokens of all.

The call of a submission stays open until its request ends, so Serve's accounting is true. Tokens travel beside it, as
one message for each engine step: the first call that this ingress has open at a replica carries the tokens of all its
requests there, until none is left. So there is no subscription to open, to address or to close, and an idle pair of
ingress and replica costs nothing. See `app.outbox` for the other end.
"""

import asyncio
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import aclosing
from contextvars import Context
from dataclasses import replace
from typing import Any
from uuid import uuid4

from app.broadcast import answers_of, ask_all
from app.engine_client import Delivery, EngineLimits, Holding, Message, Placed, Refusal, ReplicaLost, Submission
from app.openai.errors import EngineFault
from engine.errors import EngineDeadError
from engine.lora.request import LoRARequest
from engine.outputs import EngineStats, Finished, FinishReason, StepOutput, TokenLogprobs

LOAD_TIMEOUT_S = 60.0
"""Seconds that all replicas together have to read an adapter's files."""

MAX_UNREAD_TOKENS = 8192
"""Tokens of one request that may wait for its client; one who stops reading is cut off here."""

logger = logging.getLogger("ray.serve")

Key = tuple[str, int]
"""A carrier: the replica, and which of its calls."""


class ServeEngineClient:
    """`EngineClient` over a handle of the engine deployment.

    Messages come by value rather than through the object store, which halves the cost of each. Control calls go to
    every replica, past the queues of requests: an abort must not wait behind what it is to end.
    """

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._streaming = handle.options(
            stream=True, _by_reference=False, request_serialization="pickle", response_serialization="pickle"
        )
        self._name = uuid4().hex
        self._open: dict[str, ServeTokenStream] = {}
        self._unplaced: dict[ServeTokenStream, float] = {}  # and since when
        self._heard_at: dict[str, float] = {}  # by replica
        self._placed: defaultdict[Key, set[ServeTokenStream]] = defaultdict(set)
        self._ended: dict[str, int] = {}  # by replica, the last carrier that has ended
        self._unheld: set[ServeTokenStream] = set()  # by the last word of their replicas
        self._tasks: set[asyncio.Task[Any]] = set()

    async def limits(self) -> EngineLimits:
        limits: EngineLimits = await self._handle.limits.remote()
        return limits

    async def stats(self) -> list[EngineStats]:
        """Of the replicas that answer: one that is just dying hides none of the others."""
        try:
            answers = await ask_all(self._handle, "stats")
        except Exception as error:
            raise _unreachable(error) from error
        return [answer for answer in answers if isinstance(answer, EngineStats)]

    async def check_health(self) -> None:
        """As soon as one replica says that it is well."""
        try:
            async with aclosing(answers_of(self._handle, "check_health")) as answers:
                async for answer in answers:
                    if answer is True:
                        return
        except Exception as error:
            raise _unreachable(error) from error
        raise EngineFault("No engine replica is running.")

    async def load_adapter(self, request: LoRARequest) -> str:
        """One replica reads it first, which one that is asleep is woken for; then all others the very same files."""
        answer = await self._handle.load_adapter.remote(request)
        if isinstance(answer, Refusal):
            raise answer.to_error()
        digest: str = answer
        everywhere = replace(request, digest=digest)
        # One that does not answer reads it with the first request that needs it.
        for other in await ask_all(self._handle, "load_adapter", everywhere, timeout_s=LOAD_TIMEOUT_S):
            if isinstance(other, Refusal):
                raise other.to_error()
        return digest

    def submit(self, submission: Submission) -> "ServeTokenStream":
        # Out of the HTTP request's context: Serve cancels what was called in it when the client leaves, and this call
        # may carry the tokens of others.
        response = Context().run(self._streaming.submit.remote, submission, self._name)
        stream = ServeTokenStream(submission.request_id, response, self._close)
        self._open[submission.request_id] = stream
        self._unplaced[stream] = time.monotonic()
        self._spawn(self._follow(stream, response))
        return stream

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine, context=Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _follow(self, stream: "ServeTokenStream", response: Any) -> None:
        """Read a call to its end, which may be after that of its own request."""
        try:
            async for message in response:
                self._take(stream, message)
        except EngineDeadError as error:
            stream.fail(error)
            self._lose(stream, error)
        except (Exception, asyncio.CancelledError) as error:
            self._lose(stream, error)
        else:
            if stream.placed is None:  # with the refusal, or without a word
                stream.fail(ReplicaLost("The engine replica ended the request without saying how."))
            elif stream.placed.carries:
                self._end_carrier(stream.placed, "carrier ended")

    def _take(self, stream: "ServeTokenStream", message: Message) -> None:
        if isinstance(message, StepOutput):
            self._deliver(message)
            if stream.placed is not None:
                self._heard_at[stream.placed.replica] = time.monotonic()
        elif isinstance(message, Placed):
            self._heard_at[message.replica] = time.monotonic()
            self._place(stream, message)
        elif isinstance(message, Refusal):
            stream.fail(message.to_error())
        elif message.reason is FinishReason.ABORT or message.lost:
            # Its tokens may have been lost with their carrier. Those on their way are not needed: it goes on after
            # what was delivered.
            stream.fail(_lost("closed"))

    def _place(self, stream: "ServeTokenStream", placed: Placed) -> None:
        stream.placed = placed
        self._unplaced.pop(stream, None)
        if stream.closed:
            return
        if self._ended.get(placed.replica, 0) >= placed.carrier:
            stream.fail(_lost("carrier ended"))
        else:
            self._placed[placed.replica, placed.carrier].add(stream)

    def _lose(self, stream: "ServeTokenStream", error: BaseException) -> None:
        """A call broke. If it carried tokens, all whose tokens it carried are lost with it."""
        stream.fail(_lost(type(error).__name__))
        if (placed := stream.placed) is not None and placed.carries:
            self._end_carrier(placed, type(error).__name__)

    def _end_carrier(self, placed: Placed, why: str) -> None:
        """Nothing comes over a carrier any more: what has not ended, or is placed on it later, is lost. One that the
        replica ends has told all ends; one that is cancelled may end as quietly, with some untold."""
        self._ended[placed.replica] = max(placed.carrier, self._ended.get(placed.replica, 0))
        for stream in list(self._placed.get((placed.replica, placed.carrier), ())):
            stream.fail(_lost(why))

    def waits_s(self) -> float:
        """How long the request under way that has heard least has heard nothing of its replica."""
        placed = {replica for replica, _ in self._placed}
        self._heard_at = {replica: at for replica, at in self._heard_at.items() if replica in placed}
        since = min([*self._heard_at.values(), *self._unplaced.values()], default=math.inf)
        return max(0.0, time.monotonic() - since)

    def lose(self, replicas: frozenset[str]) -> None:
        """Give up what these have, and what may be on its way to them."""
        lost = list(self._unplaced)
        for (replica, carrier), streams in self._placed.items():
            if replica in replicas:
                self._ended[replica] = max(carrier, self._ended.get(replica, 0))
                lost += streams
        for stream in lost:  # which may still run there, should it go on
            stream.fail(_lost("silent"), ended=False)

    def check(self, holdings: Iterable[Holding]) -> bool:
        """Give up requests that their replica does not hold, as of two answers in a row: the word of their end is lost.

        Returns whether there are some as of this answer, so that it is worth to ask again. One is on its way there, or
        its end on the way here, when it is not held in a single answer.
        """
        held = {holding.replica: holding.request_ids for holding in holdings}
        unheld = {
            stream
            for (replica, _), streams in self._placed.items()
            if replica in held
            for stream in streams
            if not stream.ended and stream.request_id not in held[replica]
        }
        for stream in unheld & self._unheld:
            stream.fail(_lost("does not know the request"))
        self._unheld = unheld - self._unheld
        return bool(self._unheld)

    def _deliver(self, output: StepOutput) -> None:
        find = self._open.get
        for request_id, token_id in zip(output.request_ids, output.token_ids, strict=True):
            if (stream := find(request_id)) is not None:
                stream.push(token_id)
        for request_id, logprobs in output.logprobs.items():
            if (stream := find(request_id)) is not None:
                stream.logprobs += logprobs
        for request_id, prompt_logprobs in output.prompt_logprobs.items():
            if (stream := find(request_id)) is not None:
                stream.prompt_logprobs = prompt_logprobs
        for request_id, cached_tokens in output.cached_tokens.items():
            if (stream := find(request_id)) is not None:
                stream.cached_tokens = cached_tokens
        for finished in output.finished:
            if (stream := find(finished.request_id)) is not None:
                stream.end(finished)

    def _close(self, stream: "ServeTokenStream") -> None:
        """Forget a stream, and abort it if it has not ended.

        Cancelling the call reaches the replica that holds the request. Where it must not be cancelled because it
        carries the tokens of others, or where the request is still on its way and a cancelled call can leave it
        behind, an abort by its id goes to all.
        """
        if self._open.get(stream.request_id) is stream:
            del self._open[stream.request_id]
        placed = stream.placed
        if placed is None:
            self._unplaced.pop(stream, None)
            alone = True
        else:
            key = placed.replica, placed.carrier
            others = self._placed[key]
            others.discard(stream)
            # Those on their way may have been given this carrier already.
            alone = not placed.carries or not (others or self._unplaced)
            if not others:
                del self._placed[key]
        if stream.ended:
            return
        if alone:
            stream.response.cancel()
        if placed is None or not alone:
            self._spawn(self._abort(stream.request_id))

    async def _abort(self, request_id: str) -> None:
        try:
            await ask_all(self._handle, "abort", request_id)
        except Exception as error:  # no replica is left that could hold it
            logger.debug("request %s could not be aborted: %s", request_id, error)


class ServeTokenStream:
    """A submission over a Serve handle; see `TokenStream`.

    ended: whether nothing is left to abort. placed: where it is, once that is known.
    """

    __slots__ = (
        "_error",
        "_finished",
        "_on_close",
        "_waiter",
        "cached_tokens",
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
        if finished.reason is FinishReason.ABORT or finished.lost:
            self.fail(_lost("closed"))
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


def _unreachable(error: Exception) -> EngineFault:
    return EngineFault(f"The engine does not answer ({type(error).__name__}).")


def _lost(why: str) -> ReplicaLost:
    return ReplicaLost(f"The engine replica was lost ({why}).")
