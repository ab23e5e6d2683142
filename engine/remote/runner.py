"""A runner whose steps other processes compute: one rank of a group each, all of them the same step.

Its two calls go out as two messages, so that a rank may launch a step before the one ahead of it is collected.
"""

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

from engine.errors import EngineDeadError
from engine.remote.channel import ChannelClosedError, ChannelTimeoutError, Receiver, Sender
from engine.remote.step_wire import PlanDecoder, PlanEncoder, decode_result, encode_result
from engine.runner import Runner, RunnerInfo
from engine.step import StepPlan, StepResult

_COLLECT = b""
_END = b"\0"


class RemoteRunner:
    """The leader's `Runner`. plans: reach every rank, each one once. results: come from rank 0.

    A step that fails on one rank leaves the others where nobody knows: whatever goes wrong ends the group, and all
    calls from then on raise `EngineDeadError`. timeout_s: for a step.
    """

    def __init__(self, info: RunnerInfo, plans: Sequence[Sender], results: Receiver, timeout_s: float) -> None:
        self.info = info
        self._plans = plans
        self._results = results
        self._timeout_s = timeout_s
        self._encoder = PlanEncoder()
        self.lost: str | None = None

    def launch(self, plan: StepPlan) -> None:
        self._send(self._encoder.encode(plan))

    def collect(self, ticket: Any) -> StepResult:
        self._send(_COLLECT)
        try:
            return decode_result(self._results.receive(self._timeout_s, self._raise_if_lost))
        except (ChannelTimeoutError, ChannelClosedError) as error:
            self.lose(f"a step brought no result: {error}")
            raise EngineDeadError(self.lost) from error

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

    def _raise_if_lost(self) -> None:
        if self.lost is not None:
            raise EngineDeadError(self.lost)


def serve_rank(runner: Runner, plans: Receiver, results: Sender | None) -> None:
    """Do as the leader says, to the end. results: of rank 0; the others' results are the same and go nowhere."""
    decoder = PlanDecoder()
    tickets: deque[Any] = deque()
    while True:
        message = plans.receive(math.inf)
        if message == _END:
            return
        if message != _COLLECT:
            tickets.append(runner.launch(decoder.decode(message)))
            continue
        result = runner.collect(tickets.popleft())
        if results is not None:
            results.send(encode_result(result), math.inf)
