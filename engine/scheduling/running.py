"""The requests that run, and the rows and blocks that they hold."""

import numpy as np

from engine.block_hash import child
from engine.block_manager import BlockManager
from engine.lora.slots import AdapterSlots
from engine.request import Request, Status
from engine.scheduling.batch import Batch
from engine.scheduling.plan_builder import PlanBuilder
from engine.step import Ints


class Running:
    """requests: in order of admission. order: their rows; None when the list has changed since `rows` was called.
    num_batch: how many of them are of the batch class. by_tenant: how many of each tenant, where that is not 0.
    adapters: where those of them are that have one.

    What changes goes into `plans`, for the next plan to carry.
    """

    def __init__(self, batch: Batch, blocks: BlockManager, plans: PlanBuilder, adapters: AdapterSlots) -> None:
        self.requests: list[Request] = []
        self.order: Ints | None = None
        self.num_batch = 0
        self.by_tenant: dict[str, int] = {}
        self._batch = batch
        self._blocks = blocks
        self._plans = plans
        self.adapters = adapters

    def __len__(self) -> int:
        return len(self.requests)

    def rows(self) -> Ints:
        if self.order is None:
            self.order = np.array([request.row for request in self.requests], dtype=np.int32)
        return self.order

    def start(self, request: Request, hits: list[int], num_reused: int, num_computed: int) -> None:
        """Give a request a row, with the blocks `hits` of the prefix cache."""
        request.status = Status.RUNNING
        request.num_charged = len(request.token_ids)
        row = self._batch.add(request, num_reused, num_computed)
        self._plans.add_row(row)
        if request.adapter is not None:
            self._batch.adapt(row, self.adapters.take(request.adapter))
        self._blocks.take(hits)
        for block in hits:
            self._hold(request, block)
        self.requests.append(request)
        self.num_batch += request.is_batch
        self.by_tenant[request.tenant] = self.by_tenant.get(request.tenant, 0) + 1
        self.order = None

    def fill(self, request: Request, num_blocks: int) -> bool:
        """Bring a request's table to `num_blocks`; False when the pool has no more."""
        while len(request.blocks) < num_blocks:
            block = self._blocks.allocate()
            if block is None:
                return False
            self._hold(request, block)
        return True

    def _hold(self, request: Request, block: int) -> None:
        self._plans.add_block(request.row, len(request.blocks), block)
        request.blocks.append(block)

    def stop(self, request: Request) -> None:
        """It computes nothing more, but keeps its row and blocks until `release`: a step in flight may name them."""
        self.requests.remove(request)
        self.num_batch -= request.is_batch
        self.by_tenant[request.tenant] -= 1
        if not self.by_tenant[request.tenant]:
            del self.by_tenant[request.tenant]
        self.order = None
        self._batch.alive[request.row] = False

    def release(self, request: Request) -> None:
        """Give back the row and the blocks of a request that was stopped."""
        self._plans.remove_row(request.row)
        self._batch.remove(request)
        if request.adapter is not None:
            self.adapters.give_back(request.adapter)
        self._blocks.release(request.blocks)
        request.blocks = []

    def last_in_service(self, tenant: str | None = None) -> Request:
        """tenant: only of its requests, of which there must be one."""
        requests = self.requests if tenant is None else [r for r in self.requests if r.tenant == tenant]
        return max(requests, key=lambda request: (request.is_batch, request.rank, request.arrival))

    def batch_in_a_slot(self) -> Request | None:
        """The last in the order of service of those whose adapter only requests of the batch class run with."""
        wanted = {r.adapter.digest for r in self.requests if r.adapter is not None and not r.is_batch}
        found = [r for r in self.requests if r.adapter is not None and r.adapter.digest not in wanted]
        return max(found, key=lambda request: (request.rank, request.arrival), default=None)

    def tenant_above(self, tenant: str) -> str | None:
        """The tenant with most running requests, if it has so many more than `tenant` that one more for the other and
        one less for it is fairer."""
        if not self.by_tenant:
            return None
        most = max(self.by_tenant, key=self.by_tenant.__getitem__)
        return most if self.by_tenant[most] > self.by_tenant.get(tenant, 0) + 1 else None

    def register(self, rows: Ints, first: Ints, last: Ints) -> None:
        """Make blocks `first` to `last` of each row findable, now that their KV is written."""
        batch, size = self._batch, self._batch.block_size
        # A decode completes one block: the ids of all of these in one go.
        ends = rows.astype(np.int64) * batch.tokens.shape[1] + last * size
        ids = batch.tokens.take(ends[:, None] + np.arange(-size, 0))  # [rows, size]
        data, step, register = ids.astype("<i4", copy=False).tobytes(), 4 * size, self._blocks.register
        for i, (row, begin, end) in enumerate(zip(rows.tolist(), first.tolist(), last.tolist(), strict=True)):
            request = batch.requests[row]
            assert request is not None
            hashes = request.hashes
            if 0 < len(hashes) == end - 1:
                hashes.append(child(hashes[-1], data[i * step : (i + 1) * step]))
            elif len(hashes) < end:
                request.extend_hashes(batch.tokens[row], size, end)
            for block in range(begin, end):
                register(request.blocks[block], hashes[block])
        batch.num_hashes[rows] = np.maximum(batch.num_hashes[rows], last)

    def being_computed(self, rows: Ints, start: Ints, end: Ints) -> set[bytes]:
        """Digests of the blocks that `rows` complete on their way from `start` to `end` tokens, as far as known."""
        computing: set[bytes] = set()
        size = self._batch.block_size
        first = start // size
        last = np.minimum(end // size, self._batch.num_hashes[rows])
        for i in np.flatnonzero(last > first).tolist():
            request = self._batch.requests[rows[i]]
            assert request is not None
            computing.update(request.hashes[first[i] : last[i]])
        return computing
