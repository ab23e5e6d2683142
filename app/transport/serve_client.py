"""The engine deployment behind a Serve handle: one call for each request, one of which carries the tokens of all.

The call of a submission stays open until its request ends, so Serve's accounting is true. Tokens travel beside it, as
one message for each engine step: the first call that this ingress has open at a replica carries the tokens of all its
requests there, until none is left. So there is no subscription to open, to address or to close, and an idle pair of
ingress and replica costs nothing. See `app.transport.outbox` for the other end.
"""

import asyncio
import logging
from contextlib import aclosing
from contextvars import Context
from dataclasses import replace
from typing import Any
from uuid import uuid4

from ray.serve.exceptions import DeploymentUnavailableError

from app.engine_client import EngineLimits, Message, Placed, Refusal, ReplicaLost, Submission
from app.openai.errors import EngineFault
from app.transport.broadcast import answers_of, ask_all
from app.transport.carriers import LEFT, Carriers
from app.transport.token_stream import ServeTokenStream, engine_gone, loss_by, replica_lost
from engine.errors import EngineDeadError
from engine.lora.request import LoRARequest
from engine.outputs import EngineStats, StepOutput

LOAD_TIMEOUT_S = 60.0
"""Seconds that all replicas together have to read an adapter's files."""

logger = logging.getLogger("ray.serve")


class ServeEngineClient:
    """`EngineClient` over a handle of the engine deployment.

    Messages come by value rather than through the object store, which halves the cost of each. Control calls go to
    every replica, past the queues of requests: an abort must not wait behind what it is to end.
    """

    def __init__(self, handle: Any) -> None:
        self.carriers = Carriers()
        self._handle = handle
        self._streaming = handle.options(
            stream=True, _by_reference=False, request_serialization="pickle", response_serialization="pickle"
        )
        self._name = uuid4().hex
        self._open: dict[str, ServeTokenStream] = {}
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

    def submit(self, submission: Submission) -> ServeTokenStream:
        # Out of the HTTP request's context: Serve cancels what was called in it when the client leaves, and this call
        # may carry the tokens of others.
        response = Context().run(self._streaming.submit.remote, submission, self._name)
        stream = ServeTokenStream(submission.request_id, response, self._close)
        self._open[submission.request_id] = stream
        self.carriers.add(stream)
        self._spawn(self._follow(stream, response))
        return stream

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine, context=Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _follow(self, stream: ServeTokenStream, response: Any) -> None:
        """Read a call to its end, which may be after that of its own request."""
        try:
            async for message in response:
                self._take(stream, message)
        except EngineDeadError as error:
            stream.fail(error)
            self._lose(stream, error)
        except DeploymentUnavailableError:
            stream.fail(engine_gone())
        except (Exception, asyncio.CancelledError) as error:
            self._lose(stream, error)
        else:
            if stream.placed is None:  # with the refusal, or without a word
                stream.fail(ReplicaLost("The engine replica ended the request without saying how."))
            elif stream.placed.carries:
                self.carriers.end(stream.placed, LEFT if stream.cancelled else "carrier ended")

    def _take(self, stream: ServeTokenStream, message: Message) -> None:
        if isinstance(message, StepOutput):
            self._deliver(message)
            if stream.placed is not None:
                self.carriers.read(stream.placed)
        elif isinstance(message, Placed):
            self.carriers.place(stream, message)
        elif isinstance(message, Refusal):
            stream.fail(message.to_error())
        elif (loss := loss_by(message)) is not None:
            # Its tokens may have been lost with their carrier. Those on their way are not needed: it goes on after
            # what was delivered.
            stream.fail(loss)

    def _lose(self, stream: ServeTokenStream, error: BaseException) -> None:
        """A call broke. If it carried tokens, all whose tokens it carried are lost with it."""
        stream.fail(replica_lost(type(error).__name__))
        if (placed := stream.placed) is not None and placed.carries:
            self.carriers.end(placed, LEFT if stream.cancelled else type(error).__name__)

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

    def _close(self, stream: ServeTokenStream) -> None:
        """Forget a stream, and abort it if it has not ended.

        Cancelling the call reaches the replica that holds the request. Where it must not be cancelled because it
        carries the tokens of others, or where the request is still on its way and a cancelled call can leave it
        behind, an abort by its id goes to all.
        """
        if self._open.get(stream.request_id) is stream:
            del self._open[stream.request_id]
        alone = self.carriers.remove(stream)
        if stream.ended:
            return
        if alone:
            stream.cancelled = True
            stream.response.cancel()
        if stream.placed is None or not alone:
            self._spawn(self._abort(stream.request_id))

    async def _abort(self, request_id: str) -> None:
        try:
            await ask_all(self._handle, "abort", request_id)
        except Exception as error:  # no replica is left that could hold it
            logger.debug("request %s could not be aborted: %s", request_id, error)


def _unreachable(error: Exception) -> EngineFault:
    return EngineFault(f"The engine does not answer ({type(error).__name__}).")
