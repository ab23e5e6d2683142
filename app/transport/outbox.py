"""Tokens of one ingress's requests on their way out: all of a step's in one message, over one of its calls."""

import asyncio

from engine.outputs import Finished, StepOutput

MAX_UNREAD_TOKENS = 1 << 18
"""Tokens that may wait for an ingress to read; one that has stopped reading has its requests aborted."""


class Outbox:
    """What a carrier brings: the call of one request, with the tokens of all that its ingress has open here.

    Used in the event loop only. What comes while the last message is being taken is added up, so a slow reader gets
    fewer and longer messages.

    number: of the carrier, for those that are placed on it.
    """

    __slots__ = ("_arrived", "_ends", "_pending", "_taken", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self._ends: dict[str, asyncio.Future[Finished]] = {}
        self._pending: StepOutput | None = None
        self._taken = 0
        self._arrived = asyncio.Event()

    @property
    def open_ids(self) -> list[str]:
        """Requests that have not ended."""
        return list(self._ends)

    @property
    def num_open(self) -> int:
        return len(self._ends)

    @property
    def messages(self) -> int:
        """How many it takes to bring all that has come so far."""
        return self._taken + self.waiting

    @property
    def busy(self) -> bool:
        """Whether something is still to come, or to be taken."""
        return bool(self._ends) or self.waiting

    @property
    def waiting(self) -> bool:
        """Whether something has not been taken."""
        return self._pending is not None

    @property
    def overfull(self) -> bool:
        return self._pending is not None and len(self._pending.token_ids) > MAX_UNREAD_TOKENS

    def add(self, request_id: str) -> "asyncio.Future[Finished]":
        """Begin to carry a request's tokens; returns the future of its end."""
        end = self._ends[request_id] = asyncio.get_running_loop().create_future()
        return end

    def put(self, output: StepOutput) -> None:
        """Take what a step made; `output` may be kept and added to."""
        for finished in output.finished:
            if (end := self._ends.pop(finished.request_id, None)) is not None and not end.done():
                end.set_result(finished)
        if self._pending is None:
            self._pending = output
        else:
            _add(self._pending, output)
        self._arrived.set()

    async def take(self) -> StepOutput:
        """All that has come since the last call; waits if that is nothing."""
        await self._arrived.wait()
        self._arrived.clear()
        output, self._pending = self._pending, None
        assert output is not None
        self._taken += 1
        return output


def _add(to: StepOutput, output: StepOutput) -> None:
    to.request_ids += output.request_ids
    to.token_ids += output.token_ids
    to.finished += output.finished
    for request_id, logprobs in output.logprobs.items():
        to.logprobs.setdefault(request_id, []).extend(logprobs)
    to.prompt_logprobs.update(output.prompt_logprobs)
    to.cached_tokens.update(output.cached_tokens)


def split(output: StepOutput, outboxes: dict[str, Outbox]) -> dict[Outbox, StepOutput]:
    """The output of a step by where its parts go. outboxes: of each request; of those that are not there, nothing."""
    parts: dict[Outbox, StepOutput] = {}

    def part(request_id: str) -> StepOutput | None:
        outbox = outboxes.get(request_id)
        if outbox is None:
            return None
        found = parts.get(outbox)
        if found is None:
            found = parts[outbox] = StepOutput()
        return found

    for request_id, token_id in zip(output.request_ids, output.token_ids, strict=True):
        if (mine := part(request_id)) is not None:
            mine.request_ids.append(request_id)
            mine.token_ids.append(token_id)
    for request_id, logprobs in output.logprobs.items():
        if (mine := part(request_id)) is not None:
            mine.logprobs[request_id] = logprobs
    for request_id, prompt_logprobs in output.prompt_logprobs.items():
        if (mine := part(request_id)) is not None:
            mine.prompt_logprobs[request_id] = prompt_logprobs
    for request_id, cached_tokens in output.cached_tokens.items():
        if (mine := part(request_id)) is not None:
            mine.cached_tokens[request_id] = cached_tokens
    for finished in output.finished:
        if (mine := part(finished.request_id)) is not None:
            mine.finished.append(finished)
    return parts
