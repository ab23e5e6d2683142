"""Which running request gives its place up for one that waits, where no place is free.

One of the batch class does for any other, and one of a tenant with most places for one of a tenant that has fewer by
two or more.
"""

from engine.request import Request
from engine.scheduling.batch import Batch
from engine.scheduling.intake import Intake
from engine.scheduling.running import Running
from engine.scheduling.waiting import WaitingQueue


class GivingWay:
    def __init__(self, batch: Batch, waiting: WaitingQueue, running: Running, intake: Intake) -> None:
        self._batch = batch
        self._waiting = waiting
        self._running = running
        self._intake = intake

    def who(self, budget: int) -> Request | None:
        """A running request whose place the first in the queue should have. budget: tokens that the step has left."""
        first, running = self._waiting.first_ordinary(), self._running
        if first is not None and not self._intake.has_slot(first):  # nobody's row or blocks would help it
            if running.num_batch and (request := running.batch_in_a_slot()) is not None:
                return request
            first = self._waiting.first_ordinary(adapters=False)
        if first is None:
            return None
        if running.num_batch and (budget <= 0 or self._intake.lacks_room(first)):
            return running.last_in_service()
        alone = self._waiting.num_tenants == 1 and running.by_tenant.keys() == {first.tenant}
        if alone or not self._intake.lacks_room(first):
            return None
        for request in running.requests:  # by what they have had until now, another may be the first
            self.charge(request)
        first = self._first_with_slot()
        tenant = None if first is None else running.tenant_above(first.tenant)
        if first is None or tenant is None or not self._intake.lacks_room(first):
            return None
        return running.last_in_service(tenant)

    def charge(self, request: Request) -> None:
        """Count what a running request has been given to its tenant."""
        num_known = int(self._batch.num_known[request.row])
        self._waiting.charge_output(request, num_known - request.num_charged)
        request.num_charged = num_known

    def _first_with_slot(self) -> Request | None:
        """The first in the queue that a row and blocks would help."""
        first = self._waiting.first_ordinary()
        if first is None or self._intake.has_slot(first):
            return first
        return self._waiting.first_ordinary(adapters=False)
