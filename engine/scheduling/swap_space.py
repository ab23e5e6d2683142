"""Host memory for the KV of preempted requests: which host blocks are free, and whether a copy is worth it.

Bookkeeping without torch: a plan's `BlockCopies` say what is to be copied, and `engine.device.block_copies` does it.

Cost model: blocks travel out and in again at one measured time a block each way, tokens are computed again at one
measured time a token (a full step's; attention's share grows with length, which favours copies, and is left out).
Blocks that another request holds as well are found again in the prefix cache, so their tokens count as free to
recompute; they are copied all the same, since the other may be gone by then.
"""

from engine.block_manager import BlockManager
from engine.request import Request
from engine.runner import SwapInfo
from engine.scheduling.batch import Batch
from engine.scheduling.plan_builder import PlanBuilder


class SwapSpace:
    """bytes_out, bytes_in: copied so far, by the plans that say so."""

    def __init__(self, info: SwapInfo, batch: Batch, blocks: BlockManager, plans: PlanBuilder) -> None:
        self._info = info
        self._batch = batch
        self._blocks = blocks
        self._plans = plans
        self._free = list(range(info.num_blocks))
        self.bytes_out = 0
        self.bytes_in = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    def is_cheaper(self, num_blocks: int, num_tokens: int) -> bool:
        """Whether to copy `num_blocks` out and in costs less than to compute `num_tokens` again."""
        info = self._info
        return 2 * num_blocks * info.seconds_per_block < num_tokens * info.seconds_per_token

    def copy_out(self, request: Request) -> None:
        """Have a running request's KV copied to the host by the next plan, if that is worth it and there is room."""
        if request.prompt_logprobs is not None:  # a prompt to be scored goes through the model from its first token
            return
        num_tokens = int(self._batch.num_computed[request.row])
        blocks = request.blocks[: -(-num_tokens // self._batch.block_size)]
        again = num_tokens - self._blocks.count_shared(blocks) * self._batch.block_size
        if len(blocks) > len(self._free) or not self.is_cheaper(len(blocks), again):
            return
        self._free.sort()  # the lowest, so that most are neighbours and travel together
        request.host_blocks, self._free = self._free[: len(blocks)], self._free[len(blocks) :]
        request.num_on_host = num_tokens
        self._plans.copy_out(blocks, request.host_blocks)
        self.bytes_out += len(blocks) * self._info.block_bytes

    def bring_back(self, request: Request, num_hits: int) -> None:
        """Have what the cache did not keep of a request copied into the new blocks that it has just got."""
        host_blocks = request.host_blocks[num_hits:]
        if host_blocks:
            self._plans.copy_in(request.blocks[num_hits : num_hits + len(host_blocks)], host_blocks)
            # What is copied in is found by others once this step has been settled, like what it computes.
            self._batch.num_settled[request.row] = num_hits * self._batch.block_size
            self.bytes_in += len(host_blocks) * self._info.block_bytes
        self.forget(request)

    def forget(self, request: Request) -> None:
        """Give the request's host blocks back: copies from them are made before any other's to them."""
        self._free += request.host_blocks
        request.host_blocks, request.num_on_host = [], 0
