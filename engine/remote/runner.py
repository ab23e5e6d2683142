"""A runner whose steps other processes compute: one rank of a group each, all of them the same step.

Its two calls go out as two messages, so that a rank may launch a step before the one ahead of it is collected.

A rank whose step fails tells the others, which leave that step too, and computes nothing more until the leader has all
of them meet again. Then each says which of its steps was the first to fail, and the leader knows whether it has taken
tokens that some rank has no KV for.
"""

import json
import logging
import math
from collections import deque
from collections.abc import Sequence
from typing import Any

from engine.errors import EngineDeadError, RankLeftError, StepFailedError
from engine.remote.channel import ChannelClosedError, ChannelTimeoutError, Receiver, Sender
from engine.remote.step_wire import PlanDecoder, PlanEncoder, decode_result, encode_result
from engine.runner import RankRunner, RunnerInfo
from engine.step import StepPlan, StepResult

logger = logging.getLogger(__name__)

_COLLECT = b""
_END = b"\0"
_MEET_AGAIN = b"\1"

_FAILED = b"\2"
"""In the place of a step's result."""

_MAX_REASON = 300


class RemoteRunner:
    """The leader's `Runner`. plans: reach every rank, each one once. results: come from rank 0. timeout_s: for a step.

    A step that fails raises `StepFailedError`, and so do those launched behind it. A rank that is lost, or has failed
    in a step whose tokens are out, ends the group, and all calls from then on raise `EngineDeadError`.
    """

    def __init__(self, info: RunnerInfo, plans: Sequence[Sender], results: Receiver, timeout_s: float) -> None:
        self.info = info
        self._plans = plans
        self._results = results
        self._timeout_s = timeout_s
        self._encoder = PlanEncoder(self.info.max_loras)
        self._launched = 0
        self._dropped = 0  # steps up to this one that are not collected yet have no result
        self.lost: str | None = None

    def launch(self, plan: StepPlan) -> int:
        """The ticket is the step's number, from 1."""
        self._send(self._encoder.encode(plan))
        self._launched += 1
        return self._launched

    def collect(self, ticket: int) -> StepResult:
        if ticket <= self._dropped:
            raise StepFailedError("a step ahead of it failed")
        self._send(_COLLECT)
        result = self._receive()
        if result == _FAILED:
            self._meet_again(ticket)
        return decode_result(result)

    def _meet_again(self, failed: int) -> None:
        """Raises `StepFailedError`, once all ranks are ready for other steps. failed: the oldest that is in flight."""
        self._send(_MEET_AGAIN)
        words = [json.loads(word) for word in json.loads(self._receive())]
        reasons = [f"shard {rank}: {reason}" for rank, (_, reason) in enumerate(words) if reason]
        reason = "; ".join(reasons) or "no shard says why"
        if any(0 < first < failed for first, _ in words):
            self.lose(f"{reason} (in a step whose tokens were out already)")
            raise EngineDeadError(self.lost)
        self._encoder = PlanEncoder(self.info.max_loras)
        self._dropped = self._launched
        raise StepFailedError(reason)

    def lose(self, reason: str) -> None:
        """The group is lost: whoever waits for it is told within a tenth of a second. Thread-safe."""
        self.lost = self.lost or reason

    def close(self) -> None:
        """Tell the ranks that there will be no more steps."""
        if self.lost is None:
            self._send(_END)
            self.lost = "the runner is closed"

    def _send(self, message: bytes) -> None:
        self._raise_if_lost()
        try:
            for plans in self._plans:
                plans.send(message, self._timeout_s, self._raise_if_lost)
        except (ChannelTimeoutError, ChannelClosedError) as error:
            self.lose(f"a step did not reach its shards: {error}")
            raise EngineDeadError(self.lost) from error

    def _receive(self) -> bytearray:
        try:
            return self._results.receive(self._timeout_s, self._raise_if_lost)
        except (ChannelTimeoutError, ChannelClosedError) as error:
            self.lose(f"a step brought no result: {error}")
            raise EngineDeadError(self.lost) from error

    def _raise_if_lost(self) -> None:
        if self.lost is not None:
            raise EngineDeadError(self.lost)


class _Steps:
    """A rank's steps. first_failed: the number of the first that failed since the ranks met, from 1; 0: none did."""

    def __init__(self, runner: RankRunner) -> None:
        self._runner = runner
        self._decoder = PlanDecoder(self._runner.info.max_loras)
        self._tickets: deque[Any] = deque()
        self._launched = self._collected = 0
        self._first_failed = 0
        self._reason = ""

    def launch(self, message: bytearray) -> None:
        self._launched += 1
        ticket = None
        if not self._first_failed:
            try:
                ticket = self._runner.launch(self._decoder.decode(message))
            except Exception as error:
                self._fail(self._launched, error)
        self._tickets.append(ticket)

    def collect(self) -> bytes:
        """The oldest step's result, as a message."""
        self._collected += 1
        ticket = self._tickets.popleft()
        if self._first_failed and self._collected >= self._first_failed:
            return _FAILED
        try:
            return encode_result(self._runner.collect(ticket))
        except Exception as error:
            self._fail(self._collected, error)
            return _FAILED

    def meet_again(self) -> bytes:
        """What `RemoteRunner` wants to know of all ranks, as a message."""
        words = self._runner.meet_again(json.dumps([self._first_failed, self._reason]))
        self._decoder = PlanDecoder(self._runner.info.max_loras)
        self._tickets.clear()
        self._collected = self._launched
        self._first_failed, self._reason = 0, ""
        return json.dumps(words).encode()

    def _fail(self, step: int, error: Exception) -> None:
        if isinstance(error, EngineDeadError) or not self._runner.leave():
            raise error
        self._first_failed = min(self._first_failed or step, step)
        if isinstance(error, RankLeftError):
            logger.info("a step was left: %s", error)
        else:
            logger.error("a step failed", exc_info=error)
            self._reason = repr(error)[:_MAX_REASON]


def serve_rank(runner: RankRunner, plans: Receiver, results: Sender | None) -> None:
    """Do as the leader says, to the end. results: of rank 0; the others' results are the same and go nowhere.

    Raises what a step raises, if the other ranks cannot be told, and `EngineDeadError`: the group is lost then.
    """
    steps = _Steps(runner)
    while True:
        message = plans.receive(math.inf)
        if message == _END:
            return
        if message == _COLLECT:
            answer = steps.collect()
        elif message == _MEET_AGAIN:
            answer = steps.meet_again()
        else:
            steps.launch(message)
            continue
        if results is not None:
            results.send(answer, math.inf)
