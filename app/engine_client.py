"""How the ingress submits to the engine, receives tokens and aborts: the transport behind one small interface."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from app.openai.errors import ApiError, EngineFault
from engine.errors import EngineDeadError
from engine.outputs import EngineStats, Finished, TokenLogprobs
from engine.sampling_params import SamplingParams

CONTROL_TIMEOUT_S = 5.0
"""Seconds that statistics and health may take before the engine counts as unreachable."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What the ingress must know of the engine. max_total_tokens: prompt plus output of one request."""

    max_total_tokens: int
    max_num_seqs: int
    block_size: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Submission:
    """One request as the engine replica takes it.

    output_ids: tokens that it has delivered already; it goes on after them.
    block_hashes: digests of the prompt's full blocks; a router reads them too.
    """

    request_id: str
    prompt_ids: Sequence[int]
    params: SamplingParams
    output_ids: Sequence[int] = ()
    block_hashes: list[bytes] | None = None
    cache_salt: str | None = None
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Delivery:
    """New tokens of one request, from one step or from several; the last delivery says how it ended.

    logprobs: one entry for each of token_ids, if the request asked for them. prompt_logprobs: once, if asked for.
    """

    token_ids: list[int]
    finished: Finished | None = None
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: list[TokenLogprobs | None] | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """The engine would not take the request. Data and not an exception, which would cross processes with loss."""

    message: str
    param: str | None
    code: str

    def to_error(self) -> ApiError:
        return ApiError(400, self.message, param=self.param, code=self.code)


class TokenStream(Protocol):
    """The open end of a submission."""

    def __aiter__(self) -> AsyncIterator[Delivery]:
        """Deliveries, the last of them with `finished` set.

        Raises `ApiError` 400 if the engine refused the request, `EngineFault` if it was lost, `EngineDeadError`.
        """

    def close(self) -> None:
        """Abort unless it has ended. A plain call, good in a `finally` and idempotent."""


class EngineClient(Protocol):
    """Everything the ingress asks of the engine."""

    async def limits(self) -> EngineLimits: ...

    async def stats(self) -> list[EngineStats]:
        """One entry for each replica."""

    async def check_health(self) -> None:
        """Raise `EngineFault` if no replica can serve."""

    def submit(self, submission: Submission) -> TokenStream: ...


class ServeEngineClient:
    """The engine deployment behind a Serve handle: one streaming call for each request.

    Tokens come by value rather than through the object store, which halves the cost of each message. Control calls
    go to every replica, past the queues of requests: an abort must not wait behind what it is to end.
    """

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._streaming = handle.options(stream=True, _by_reference=False)
        self._aborts: set[asyncio.Task[Any]] = set()

    async def limits(self) -> EngineLimits:
        limits: EngineLimits = await self._handle.limits.remote()
        return limits

    async def stats(self) -> list[EngineStats]:
        return await self._ask_all("stats")

    async def check_health(self) -> None:
        if not await self._ask_all("check_health"):
            raise EngineFault("No engine replica is running.")

    def submit(self, submission: Submission) -> "ServeTokenStream":
        return ServeTokenStream(self, self._streaming.submit.remote(submission), submission.request_id)

    def abort(self, request_id: str) -> None:
        """Send an abort to whichever replica holds the request, or is about to receive it."""
        task = asyncio.ensure_future(self._abort(request_id))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _abort(self, request_id: str) -> None:
        await self._handle.broadcast("abort", request_id).results_async(
            timeout_s=CONTROL_TIMEOUT_S, return_exceptions=True
        )

    async def _ask_all(self, method: str) -> list[Any]:
        try:
            answers: list[Any] = await self._handle.broadcast(method).results_async(timeout_s=CONTROL_TIMEOUT_S)
        except Exception as error:
            raise EngineFault(f"The engine does not answer ({type(error).__name__}).") from error
        return answers


class ServeTokenStream:
    """A submission over a Serve handle; see `TokenStream`."""

    def __init__(self, client: ServeEngineClient, response: Any, request_id: str) -> None:
        self._client = client
        self._response = response
        self._request_id = request_id
        self._ended = False

    async def __aiter__(self) -> AsyncIterator[Delivery]:
        try:
            async for message in self._response:
                if isinstance(message, Refusal):
                    self._ended = True
                    raise message.to_error()
                self._ended = message.finished is not None
                yield message
                if self._ended:
                    return
        except (ApiError, EngineDeadError):
            raise
        except Exception as error:
            raise EngineFault(f"The engine replica was lost ({type(error).__name__}).") from error
        raise EngineFault("The engine replica ended the request without saying how.")

    def close(self) -> None:
        """Cancel the call, and abort by id as well: a call that is cancelled early can leave its request behind."""
        if not self._ended:
            self._ended = True
            self._response.cancel()
            self._client.abort(self._request_id)
