"""Steps that are planned and not settled yet, and what ended while they name it."""

from collections import deque

from engine.request import Request
from engine.scheduling.batch import Batch
from engine.scheduling.running import Running
from engine.step import StepPlan


class InFlight:
    """steps: the oldest first, each with the digests of the blocks that it completes.

    What ended keeps its row and blocks until the last step that names it is settled.
    """

    def __init__(self, batch: Batch, running: Running) -> None:
        self.steps: deque[tuple[StepPlan, set[bytes]]] = deque()
        self.ended: list[Request] = []
        self._batch = batch
        self._running = running

    def end(self, request: Request) -> None:
        """Give back what a request held that was stopped: now, or when no step names it any more."""
        if self._batch.in_flight[request.row]:
            self.ended.append(request)
        else:
            self._running.release(request)

    def settle(self, plan: StepPlan) -> None:
        """The oldest step is over."""
        oldest, _ = self.steps.popleft()
        assert oldest is plan, "steps are settled in the order of their plans"
        self._batch.in_flight[plan.rows] -= 1
        if self.ended:
            ended, self.ended = self.ended, []
            for request in ended:
                self.end(request)
