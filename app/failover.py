"""Streams that survive the replica they run on: what is lost goes on elsewhere, after the tokens it has delivered.

The engine takes a request up after any of its tokens as if it had made them itself (`output_ids` of a submission), and
a token is a function of the request, its seed and its position. So the stream goes on with what it would have had.
"""

import asyncio
import logging
import time
from dataclasses import dataclass, replace

from app.engine_client import CarrierLost, Delivery, EngineClient, EngineLimits, ReplicaLost, Submission, TokenStream
from app.openai.errors import CONTEXT_LENGTH, ApiError
from engine.errors import EngineDeadError
from engine.lora.request import LoRARequest
from engine.outputs import EngineStats, Finished, FinishReason

FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 2.0
"""Before a request goes on that got nowhere the last time: from the first, doubling, to the second."""

logger = logging.getLogger("ray.serve")


@dataclass(slots=True)
class FailoverCounts:
    """resubmitted: requests that went on elsewhere. given_up: those that failed all the same.

    longest_pause_s: seconds without a token that a client has met by it.
    """

    resubmitted: int = 0
    given_up: int = 0
    longest_pause_s: float = 0.0


class FailoverClient:
    """`EngineClient` over another one, whose losses it makes good.

    max_tries: resubmissions of a request in a row that bring no more than one token; the next loss is an error. One
        token proves nothing: a request that kills a replica in its first decode has got the first one from its prompt.
        A `CarrierLost` is none of them.
    """

    def __init__(self, client: EngineClient, max_tries: int) -> None:
        self._client = client
        self.max_tries = max_tries
        self.counts = FailoverCounts()

    async def limits(self) -> EngineLimits:
        return await self._client.limits()

    async def stats(self) -> list[EngineStats]:
        return await self._client.stats()

    async def check_health(self) -> None:
        await self._client.check_health()

    async def load_adapter(self, request: LoRARequest) -> str:
        return await self._client.load_adapter(request)

    def submit(self, submission: Submission) -> "FailoverStream":
        return FailoverStream(self, self._client, submission)


class FailoverStream:
    """A submission that may have several streams, one after the other; see `TokenStream`."""

    def __init__(self, owner: FailoverClient, client: EngineClient, submission: Submission) -> None:
        self._owner = owner
        self._client = client
        self._submission = submission
        self._delivered: list[int] = []
        self._submitted = 0  # again, so many times
        self._futile = 0  # of these in a row, those that got nowhere
        self._num_tokens = 0  # of the last of these
        self._heard_at = 0.0
        self._lost_at = 0.0
        self._cut_short = False
        self._stream: TokenStream = client.submit(submission)

    def __aiter__(self) -> "FailoverStream":
        return self

    async def __anext__(self) -> Delivery:
        while not self._cut_short:
            try:
                delivery = await anext(self._stream)
            except (ReplicaLost, EngineDeadError) as error:
                self._stream.close()
                await self._go_on(error)
                continue
            except ApiError as error:
                if self._delivered and error.code == CONTEXT_LENGTH:
                    return self._end_here(error)
                raise
            self._delivered += delivery.token_ids
            self._num_tokens += len(delivery.token_ids)
            self._heard_at = time.monotonic()
            if self._futile and self._num_tokens > 1:
                self._futile = 0
            if self._lost_at:
                counts = self._owner.counts
                counts.longest_pause_s = max(counts.longest_pause_s, self._heard_at - self._lost_at)
                self._lost_at = 0.0
            return delivery
        raise StopAsyncIteration

    def close(self) -> None:
        self._stream.close()

    def _end_here(self, error: ApiError) -> Delivery:
        """It went on to a replica with less memory than the one that it began on, as replicas on different machines may
        have: there it has as many tokens as it can have."""
        self._cut_short = True
        logger.warning("request %s ends before its limit: %s", self._submission.request_id, error)
        num_output = len(self._submission.output_ids) + len(self._delivered)
        num_prompt = len(self._submission.prompt_ids)
        return Delivery([], Finished(self._submission.request_id, FinishReason.LENGTH, num_prompt, num_output, 0))

    async def _go_on(self, error: Exception) -> None:
        """Submit again what is left, or raise `error` if that has been futile too often."""
        counts, first = self._owner.counts, self._submission
        blameless = isinstance(error, CarrierLost)  # however often others leave just when it comes
        if self._futile >= self._owner.max_tries and not blameless:
            counts.given_up += 1
            raise error
        self._lost_at = self._lost_at or self._heard_at or time.monotonic()
        if not blameless:
            if self._futile:
                await asyncio.sleep(min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (self._futile - 1)))
            self._futile += 1
        self._submitted += 1
        self._num_tokens = 0
        counts.resubmitted += 1
        logger.warning("request %s goes on elsewhere: %s", first.request_id, error)
        # Under another id: the old one may not have ended everywhere, and tokens of it may be on their way.
        again = replace(
            first,
            request_id=f"{first.request_id}~{self._submitted}",
            output_ids=[*first.output_ids, *self._delivered],
            priority=first.priority - 1,  # a stream that stands still comes before those that have not begun
        )
        self._stream = self._client.submit(again)
