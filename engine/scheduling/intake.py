"""Which waiting requests start: in the order of service, while rows, blocks and budget last."""

from collections.abc import Callable

from engine.block_manager import BlockManager
from engine.request import Request
from engine.scheduling.batch import Batch
from engine.scheduling.fair_queue import Entry
from engine.scheduling.running import Running
from engine.scheduling.swap_space import SwapSpace
from engine.scheduling.waiting import WaitingQueue

MAX_SKIPPED = 16
"""Waiting requests passed over in one step because their next block is being computed by another."""


class Intake:
    """num_prompt_tokens: of requests that have started; num_cached_prompt_tokens: of these, found in the cache.

    found: by the id of each request for which the cache had something, how many tokens; whoever tells it clears it.
    """

    def __init__(
        self, batch: Batch, blocks: BlockManager, waiting: WaitingQueue, running: Running, swap: SwapSpace | None
    ) -> None:
        self._batch = batch
        self._blocks = blocks
        self._waiting = waiting
        self._running = running
        self._swap = swap
        self.num_prompt_tokens = 0
        self.num_cached_prompt_tokens = 0
        self.found: dict[str, int] = {}

    def admit(
        self, budget: int, chunk: Callable[[int, int], int], computing: set[bytes]
    ) -> tuple[list[int], list[int]]:
        """Start what can be; returns their rows, and how many tokens each computes in this step.

        chunk: tokens of a prompt that has so many to go, with so many left of the budget.
        computing: digests of the blocks that others compute now; those of the admitted are added.
        """
        size = self._batch.block_size
        new_rows, new_counts = [], []
        skipped: list[Entry[Request]] = []
        adapters = True
        while self._batch.num_free_rows and budget > 0 and len(skipped) < MAX_SKIPPED:
            entry = self._waiting.pop(adapters=adapters)
            if entry is None:
                break
            request = entry.item
            # Once one waits for a slot, so do all behind it that have an adapter: or those that come for the adapters
            # in the slots would keep it waiting for ever.
            if not self.has_slot(request):
                self._waiting.put_back(entry)
                adapters = False
                continue
            scored = request.prompt_logprobs is not None  # so each of its tokens must be computed
            hits = [] if scored else self._blocks.lookup(request.hashes)
            total = len(request.token_ids)
            reused = len(hits) * size
            to_compute = not scored and request.num_on_host <= reused and len(hits) < len(request.hashes)
            if to_compute and request.hashes[len(hits)] in computing:
                skipped.append(entry)
                continue
            # A full hit still computes its last token: someone must sample from it.
            start = min(max(reused, request.num_on_host), total - 1)
            count = chunk(total - start, budget)
            if count == 0 or not self._fits(total, hits):
                skipped.append(entry)
                break
            self._start(request, hits, reused, start)
            new_rows.append(request.row)
            new_counts.append(count)
            budget -= count
            self._running.fill(request, -(-(start + count) // size))
            if request.host_blocks:
                assert self._swap is not None
                self._swap.bring_back(request, len(hits))
            computing.update(request.hashes[len(hits) : (start + count) // size])
        for entry in skipped:
            self._waiting.put_back(entry)
        return new_rows, new_counts

    def has_slot(self, request: Request) -> bool:
        """Whether there is a place on the device for its adapter, if it has one."""
        return request.adapter is None or self._running.adapters.has_room(request.adapter)

    def lacks_room(self, request: Request) -> bool:
        """Whether a request waits for a row or for blocks, and for nothing else."""
        if not self.has_slot(request):
            return False
        if not self._batch.num_free_rows:
            return True
        hits = [] if request.prompt_logprobs is not None else self._blocks.lookup(request.hashes)
        return not self._fits(len(request.token_ids), hits)

    def _fits(self, total: int, hits: list[int]) -> bool:
        """Whether all of a request's tokens find room, with a block to spare for each that already runs.

        The spare blocks keep a request from being admitted only to be preempted by the next decode.
        """
        needed = -(-total // self._batch.block_size) - len(hits) + self._blocks.count_evictable(hits)
        return needed + len(self._running) <= self._blocks.num_available

    def _start(self, request: Request, hits: list[int], reused: int, start: int) -> None:
        self._running.start(request, hits, reused, start)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = min(reused, request.num_prompt)
            self.num_prompt_tokens += request.num_prompt
            self.num_cached_prompt_tokens += request.num_cached_tokens
            if request.num_cached_tokens:
                self.found[request.request_id] = request.num_cached_tokens
