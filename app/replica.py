"""The engine deployment: token ids in, token ids out. The work is done by `EngineReplica`, which knows no Ray."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any

from app.engine_client import Delivery, EngineLimits, Refusal, Submission
from engine.config import EngineConfig
from engine.errors import ContextLengthError, InvalidRequestError
from engine.outputs import EngineStats, Finished, StepOutput, TokenLogprobs

MAX_STALL_S = 60.0
"""Seconds with work queued and no step made after which the replica counts as dead."""

MAX_UNREAD_TOKENS = 8192
"""Tokens of one request that may wait for its reader; one who stops reading is cut off here."""

logger = logging.getLogger("ray.serve")


class Mailbox:
    """Tokens of one request on their way from the step thread to its stream; used in the event loop only."""

    __slots__ = ("_arrived", "finished", "logprobs", "prompt_logprobs", "token_ids")

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self.finished: Finished | None = None
        self._arrived = asyncio.Event()

    def wake(self) -> None:
        self._arrived.set()

    async def take(self) -> Delivery:
        """All that has come since the last call; waits if that is nothing."""
        await self._arrived.wait()
        self._arrived.clear()
        token_ids, self.token_ids = self.token_ids, []
        if not self.logprobs and self.prompt_logprobs is None:
            return Delivery(token_ids, self.finished)
        logprobs, self.logprobs = self.logprobs, []
        prompt_logprobs, self.prompt_logprobs = self.prompt_logprobs, None
        return Delivery(token_ids, self.finished, logprobs, prompt_logprobs)


class EngineReplica:
    """One engine with its step thread, and the streams of its requests.

    make_step_loop: builds the step loop (see `engine.step_loop.StepLoop`) around a function for its output.
    """

    def __init__(self, make_step_loop: Callable[[Callable[[StepOutput], None]], Any]) -> None:
        self._event_loop = asyncio.get_running_loop()
        self._mailboxes: dict[str, Mailbox] = {}
        self._step_loop = make_step_loop(self._on_output)
        self._step_loop.start()

    async def submit(self, submission: Submission) -> AsyncGenerator[Delivery | Refusal, None]:
        """Run a request to its end. Open until then; whoever closes or cancels it aborts the request.

        Raises `EngineDeadError`.
        """
        request_id = submission.request_id
        if request_id in self._mailboxes:
            yield Refusal(f"A request with id {request_id!r} is already there.", "request_id", "invalid_value")
            return
        mailbox = self._mailboxes[request_id] = Mailbox()
        running = False
        try:
            if (refusal := await self._compile(submission) or self._start(submission)) is not None:
                yield refusal
                return
            running = True
            while running:
                delivery = await mailbox.take()
                running = delivery.finished is None
                yield delivery
        finally:
            del self._mailboxes[request_id]
            if running:
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

    def _start(self, submission: Submission) -> Refusal | None:
        try:
            self._step_loop.submit(
                submission.request_id,
                submission.prompt_ids,
                submission.params,
                submission.output_ids,
                block_hashes=submission.block_hashes,
                cache_salt=submission.cache_salt,
                priority=submission.priority,
            )
        except ContextLengthError as error:
            return Refusal(str(error), error.param, "context_length_exceeded")
        except InvalidRequestError as error:
            return Refusal(str(error), error.param, "invalid_value")
        return None

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
        touched = set()
        for request_id, token_id in zip(output.request_ids, output.token_ids, strict=True):
            mailbox = self._mailboxes.get(request_id)
            if mailbox is not None:
                mailbox.token_ids.append(token_id)
                touched.add(mailbox)
                if len(mailbox.token_ids) == MAX_UNREAD_TOKENS:
                    logger.warning("request %s is aborted: its client does not read", request_id)
                    self._step_loop.abort(request_id)
        for request_id, logprobs in output.logprobs.items():
            mailbox = self._mailboxes.get(request_id)
            if mailbox is not None:
                mailbox.logprobs += logprobs
        for request_id, prompt_logprobs in output.prompt_logprobs.items():
            mailbox = self._mailboxes.get(request_id)
            if mailbox is not None:
                mailbox.prompt_logprobs = prompt_logprobs
        for finished in output.finished:
            mailbox = self._mailboxes.get(finished.request_id)
            if mailbox is not None:
                mailbox.finished = finished
                touched.add(mailbox)
        for mailbox in touched:
            mailbox.wake()


def start_replica(config: EngineConfig) -> EngineReplica:
    """Load the model and start stepping. Blocks for as long as loading takes; call it in the event loop's thread."""
    from engine.engine import Engine
    from engine.step_loop import StepLoop

    engine = Engine.from_config(config)
    info = engine.info
    logger.info(
        "Engine ready: %d KV blocks of %d tokens, requests of up to %d tokens, %d at once.",
        info.num_blocks,
        info.block_size,
        info.max_total_tokens,
        info.max_num_seqs,
    )
    return EngineReplica(lambda on_output: StepLoop(engine, on_output))


def show_engine_log() -> None:
    """Let the engine's own log lines reach Serve's log; a library, it sets up none."""
    engine_log = logging.getLogger("engine")
    engine_log.handlers = list(logger.handlers)
    engine_log.setLevel(logger.level)
    engine_log.propagate = False


class EngineDeployment:
    """What Serve runs: a shell, since a class under a deployment travels by value."""

    def __init__(self, config: EngineConfig) -> None:
        show_engine_log()
        self._replica = start_replica(config)

    async def submit(self, submission: Submission) -> AsyncGenerator[Delivery | Refusal, None]:
        return self._replica.submit(submission)

    async def abort(self, request_id: str) -> None:
        self._replica.abort(request_id)

    async def limits(self) -> EngineLimits:
        return self._replica.limits()

    async def stats(self) -> EngineStats:
        return self._replica.stats()

    async def check_health(self) -> bool:
        """Asked by Serve and by the ingress; async, since Serve would run a plain one in a thread that sees nothing."""
        self._replica.check_health()
        return True

    def __del__(self) -> None:
        if hasattr(self, "_replica"):
            self._replica.close()
