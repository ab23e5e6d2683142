"""One engine replica, without Ray: token ids in, token ids out, over calls that stay open until their requests end."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from app.engine_client import EngineLimits, Holding, Message, Placed, Refusal, Submission
from app.openai.errors import CONTEXT_LENGTH
from app.transport.outbox import Outbox, split
from engine.errors import ContextLengthError, InvalidRequestError
from engine.lora.request import AdapterError, LoRARequest
from engine.outputs import EngineStats, StepOutput

if TYPE_CHECKING:
    from engine.lora.adapter import Adapter

MAX_STALL_S = 60.0
"""Seconds with work queued and no step made after which the replica counts as dead."""

logger = logging.getLogger("ray.serve")


class EngineReplica:
    """One engine with its step thread, and the calls of its requests.

    make_step_loop: builds the step loop (see `engine.step_loop.StepLoop`) around a function for its output.
    on_failure: called in the event loop once the step thread has failed and all requests have been told.
    name: that no other replica has, ever; by default a drawn one.
    """

    def __init__(
        self,
        make_step_loop: Callable[[Callable[[StepOutput], None]], Any],
        on_failure: Callable[[], None] = lambda: None,
        name: str | None = None,
    ) -> None:
        self._event_loop = asyncio.get_running_loop()
        self.name = name or uuid4().hex
        self._carriers = 0
        self._outboxes: dict[str, Outbox] = {}  # by ingress
        self._outbox_of: dict[str, Outbox] = {}  # by request
        self._on_failure = on_failure
        self._step_loop = make_step_loop(self._on_output)
        self._step_loop.start()

    async def submit(self, submission: Submission, ingress: str) -> AsyncGenerator[Message, None]:
        """Run a request to its end. Open until then; whoever closes or cancels it aborts the request.

        A refusal, or `Placed` and then its end. The first call that an ingress has open brings, in place of its own
        end, the tokens and ends of all its requests that are placed while it is open, and is open as long as any of
        them is; closing it early aborts them all. ingress: who asks, by a name that no other has.

        Raises `EngineDeadError`.
        """
        request_id = submission.request_id
        adapter = None if submission.lora is None else await self._adapter(submission.lora)
        if isinstance(adapter, Refusal):
            yield adapter
            return
        if (refusal := await self._compile(submission) or self._start(submission, adapter)) is not None:
            yield refusal
            return
        outbox = self._outboxes.get(ingress)
        carries = outbox is None
        if outbox is None:
            self._carriers += 1
            outbox = self._outboxes[ingress] = Outbox(self._carriers)
        self._outbox_of[request_id] = outbox
        end = outbox.add(request_id)
        try:
            yield Placed(self.name, outbox.number, carries)
            if carries:
                while outbox.busy:
                    yield await outbox.take()
            else:
                yield await end
        finally:
            # Between the last look at `busy` and here nothing else runs, so none is placed on a carrier that ends.
            if carries:
                del self._outboxes[ingress]
                for open_id in outbox.open_ids:
                    self._step_loop.abort(open_id)
            elif not end.done() or end.cancelled():
                self._step_loop.abort(request_id)

    async def _compile(self, submission: Submission) -> Refusal | None:
        """Have the grammar ready before the step thread needs it: that thread must not wait for one request."""
        compiling = self._step_loop.compile_grammar(submission.params)
        if compiling is None:
            return None
        try:
            await asyncio.shield(asyncio.wrap_future(compiling))  # others may wait for the same one
        except InvalidRequestError as error:
            return Refusal(str(error), error.param, "invalid_value")
        return None

    async def load_adapter(self, request: LoRARequest) -> str | Refusal:
        """Read an adapter, so that no request waits for it; returns its digest."""
        adapter = await self._adapter(request)
        return adapter if isinstance(adapter, Refusal) else adapter.digest

    async def _adapter(self, request: LoRARequest) -> "Adapter | Refusal":
        try:
            return await asyncio.to_thread(self._step_loop.load_adapter, request)
        except AdapterError as error:
            if error.is_missing:
                return Refusal(str(error), error.param, "not_found", 404)
            return Refusal(str(error), error.param, "invalid_value")
        except InvalidRequestError as error:
            return Refusal(str(error), error.param, "invalid_value")

    def _start(self, submission: Submission, adapter: "Adapter | None") -> Refusal | None:
        try:
            self._step_loop.submit(
                submission.request_id,
                submission.prompt_ids,
                submission.params,
                submission.output_ids,
                block_hashes=submission.block_hashes,
                cache_salt=submission.cache_salt,
                priority=submission.priority,
                tenant=submission.tenant,
                is_batch=submission.is_batch,
                adapter=adapter,
            )
        except ContextLengthError as error:
            return Refusal(str(error), error.param, CONTEXT_LENGTH)
        except InvalidRequestError as error:
            return Refusal(str(error), error.param, "invalid_value")
        return None

    def holding(self) -> Holding:
        """The requests whose end has not been told."""
        sent = {outbox.number: outbox.messages for outbox in self._outboxes.values()}
        return Holding(self.name, frozenset(self._outbox_of), sent)

    def abort(self, request_id: str) -> None:
        """End a request by its id: idempotent, and good before the request has arrived."""
        self._step_loop.abort(request_id)

    def limits(self) -> EngineLimits:
        info = self._step_loop.engine.info
        return EngineLimits(
            max_total_tokens=info.max_total_tokens,
            max_num_seqs=info.max_num_seqs,
            block_size=info.block_size,
            vocab_size=info.vocab_size,
            kv_tokens=info.num_blocks * info.block_size,
        )

    def stats(self) -> EngineStats:
        stats: EngineStats = self._step_loop.stats()
        return stats

    def check_health(self) -> None:
        """Raise `EngineDeadError` if the step thread ended or stands still with work queued."""
        self._step_loop.check_health(MAX_STALL_S)

    def close(self) -> None:
        self._step_loop.close()

    def _on_output(self, output: StepOutput) -> None:
        """In the step thread: hand a whole step over in one wake-up of the event loop."""
        try:
            self._event_loop.call_soon_threadsafe(self._deliver, output)
        except RuntimeError:  # the event loop is closed: nobody is left to read
            logger.debug("tokens of a step were dropped: the replica is closing")

    def _deliver(self, output: StepOutput) -> None:
        outbox = next(iter(self._outboxes.values()), None)
        # An ingress passes over what it does not know; a carrier that has broken has calls that wait for their ends.
        if outbox is not None and outbox.num_open == len(self._outbox_of):
            self._put(outbox, output)
        else:
            for outbox, part in split(output, self._outbox_of).items():
                self._put(outbox, part)
        for finished in output.finished:
            self._outbox_of.pop(finished.request_id, None)
        if self._step_loop.failed:
            self._on_failure()

    def _put(self, outbox: Outbox, output: StepOutput) -> None:
        outbox.put(output)
        if outbox.overfull:
            logger.warning("%d requests are aborted: their ingress does not read", len(outbox.open_ids))
            for request_id in outbox.open_ids:
                self._step_loop.abort(request_id)
