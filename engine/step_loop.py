"""Runs an engine in one thread of its own, so that an event loop beside it stays free.

Requests and aborts go in through a queue; the tokens of a step come out in one call of `on_output`.
"""

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from engine.engine import Engine
from engine.errors import EngineDeadError, InvalidRequestError
from engine.lora.request import LoRARequest
from engine.outputs import EngineStats, Finished, FinishReason, StepOutput
from engine.sampling_params import SamplingParams
from engine.structured.grammar import Grammar

if TYPE_CHECKING:
    from engine.lora.adapter import Adapter

logger = logging.getLogger(__name__)

MAX_TOMBSTONES = 4096
"""Aborts remembered for requests that have not arrived: a client may leave faster than its request travels."""


class StepLoop:
    """Owner of an engine: after `start`, no other thread may touch it.

    on_output is called in the step thread, once a step, with the tokens of all requests and with the ends of those
    that finished, failed or were aborted. Each request that `submit` took ends there exactly once.
    """

    def __init__(self, engine: Engine, on_output: Callable[[StepOutput], None]) -> None:
        self.engine = engine
        self._on_output = on_output
        self._commands: deque[Callable[[], Finished | None]] = deque()
        self._wake = threading.Condition()
        self._open: set[str] = set()
        self._tombstones: OrderedDict[str, None] = OrderedDict()
        self._closing = False
        self._error: BaseException | None = None
        self._stats = engine.stats()
        self._progress = time.monotonic()
        self._idle = True
        self._thread = threading.Thread(target=self._run, name="engine-step", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        output_ids: Sequence[int] = (),
        *,
        priority: int = 0,
        tenant: str = "",
        is_batch: bool = False,
        block_hashes: list[bytes] | None = None,
        cache_salt: str | None = None,
        adapter: "Adapter | None" = None,
    ) -> None:
        """Queue a request. Thread-safe; refuses in the caller's thread.

        Raises `InvalidRequestError`, `ContextLengthError` as `Engine.check` does, `EngineDeadError` when the thread
        has ended.
        """
        self.engine.check(prompt_ids, params, output_ids)

        def add() -> Finished | None:
            try:
                self.engine.add_request(
                    request_id,
                    prompt_ids,
                    params,
                    output_ids,
                    priority=priority,
                    tenant=tenant,
                    is_batch=is_batch,
                    block_hashes=block_hashes,
                    cache_salt=cache_salt,
                    adapter=adapter,
                )
            except Exception as error:  # one request that cannot be added must not end the others
                logger.exception("request %s could not be added", request_id)
                text = f"{type(error).__name__} when the request was added"
                return Finished(request_id, FinishReason.ERROR, len(prompt_ids), len(output_ids), 0, error=text)
            return None

        with self._wake:
            self._raise_if_dead()
            if request_id in self._open:
                raise InvalidRequestError(f"A request with id {request_id!r} is already there.", "request_id")
            self._open.add(request_id)
            if request_id in self._tombstones:
                del self._tombstones[request_id]
                ended = Finished(request_id, FinishReason.ABORT, len(prompt_ids), len(output_ids), 0)
                self._commands.append(lambda: ended)
            else:
                self._commands.append(add)
            self._wake.notify()

    def compile_grammar(self, params: SamplingParams) -> Future[Grammar] | None:
        """As `Engine.compile_grammar`: await it before `submit`, or the step thread waits, and all streams with it."""
        return self.engine.compile_grammar(params)

    def load_adapter(self, request: LoRARequest) -> "Adapter":
        """As `Engine.load_adapter`: files are read in the caller's thread, for milliseconds."""
        return self.engine.load_adapter(request)

    def abort(self, request_id: str) -> None:
        """End a request. Thread-safe, idempotent, and good before the request has arrived."""
        with self._wake:
            if request_id in self._open:
                self._commands.append(lambda: self.engine.abort(request_id))
                self._wake.notify()
                return
            self._tombstones[request_id] = None
            if len(self._tombstones) > MAX_TOMBSTONES:
                self._tombstones.popitem(last=False)

    def stats(self) -> EngineStats:
        """The engine's state after its last step. Thread-safe."""
        return self._stats

    def check_health(self, stall_s: float) -> None:
        """Raise `EngineDeadError` if the thread ended or has made no step for `stall_s` seconds with work queued."""
        self._raise_if_dead()
        stalled = time.monotonic() - self._progress
        if not self._idle and stalled > stall_s:
            raise EngineDeadError(f"the engine has made no step for {stalled:.0f} s with work queued")

    @property
    def failed(self) -> bool:
        """Whether the thread ended, or is about to end, by an error. Thread-safe."""
        return self._error is not None

    def close(self) -> None:
        """End all requests and the thread; idempotent. Called from `on_output`, it does not wait for the thread."""
        with self._wake:
            started = self._thread.ident is not None
            first, self._closing = not self._closing, True
            self._wake.notify()
        if not started and first:
            self._end()
        elif self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _raise_if_dead(self) -> None:
        if self._error is not None:
            raise EngineDeadError(f"the engine has stopped: {self._error}") from self._error
        if self._closing:
            raise EngineDeadError("the engine has been closed")

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                output = self._step()
                if output.token_ids or output.finished:
                    self._deliver(output)
        except BaseException as error:
            logger.exception("the step thread ended")
            self._error = error
        finally:
            self._end()

    def _end(self) -> None:
        """Tell every open request that it is over, and free the engine, whatever the consumer makes of it."""
        with self._wake:
            self._closing = True
            left = sorted(self._open)
        reason = FinishReason.ABORT if self._error is None else FinishReason.ERROR
        text = None if self._error is None else f"the engine has stopped: {type(self._error).__name__}"
        try:
            ends = [Finished(name, reason, 0, 0, 0, error=text, lost=True) for name in left]
            self._deliver(StepOutput(finished=ends))
        except Exception:
            logger.exception("the ends of %d requests could not be delivered", len(left))
        self.engine.close()

    def _wait_for_work(self) -> bool:
        """Sleep until there is something to do; False when closing."""
        with self._wake:
            while not self._closing and not self._commands and not self.engine.has_work():
                self._idle = True
                self._wake.wait()
            if self._idle:
                self._progress = time.monotonic()
                self._idle = False
            return not self._closing

    def _step(self) -> StepOutput:
        ended = []
        while self._commands:
            if (finished := self._commands.popleft()()) is not None:
                ended.append(finished)
        output = self.engine.step()
        output.finished += ended
        self._stats = self.engine.stats()
        self._progress = time.monotonic()
        return output

    def _deliver(self, output: StepOutput) -> None:
        with self._wake:
            self._open.difference_update(finished.request_id for finished in output.finished)
        self._on_output(output)
