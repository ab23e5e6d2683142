"""The host's half of the persistent batch: one row for each running request, as flat arrays.

A request keeps its row from admission until it finishes or is preempted, and nothing is moved in between. A step
touches rows through index arrays, so its cost hardly grows with the number of sequences.
"""

import numpy as np

from engine.request import Request
from engine.scheduling.extras import ExtraRows

PENDING = -1
"""Stands for a token that a launched step will sample."""


class Batch:
    """R = max_num_seqs rows.

    tokens: [R, max_total_tokens] prompt and output ids.
    num_tokens: [R] tokens there are, with those that a launched step will sample; these stand as PENDING in `tokens`.
    num_known: [R] tokens whose ids are known here.
    num_computed: [R] tokens whose KV is in the cache, or will be by the steps that are launched.
    num_settled: [R] num_computed less what steps in flight compute.
    num_reused: [R] leading tokens whose KV was there already; their slots are never written again.
    in_flight: [R] launched steps that name the row and have not been collected.
    alive: [R] whether the row's request is running; one that ended in flight keeps its row until `in_flight` is 0.
    limit: [R] num_tokens at which the request ends by length.
    stop_from: [R] num_tokens from which a stop token counts (prompt + min_tokens).
    stop_ids: [R, K] ids that end the request, filled up with -1.
    block_table: [R, max_blocks] and num_blocks [R].
    num_hashes: [R] full blocks whose digests are known.
    adapter_slots: [R] int32, where the device has the request's adapter, -1 without one.
    temperature, top_p, min_p: [R] float32; top_k: [R] int32, 0 for all; seed: [R] int64.
    extras: what only some rows need.
    """

    def __init__(self, max_num_seqs: int, max_total_tokens: int, block_size: int) -> None:
        rows = max_num_seqs
        self.block_size = block_size
        self.max_blocks = -(-max_total_tokens // block_size)
        self.tokens = np.zeros((rows, max_total_tokens), dtype=np.int32)
        self.num_tokens = np.zeros(rows, dtype=np.int32)
        self.num_known = np.zeros(rows, dtype=np.int32)
        self.num_computed = np.zeros(rows, dtype=np.int32)
        self.num_settled = np.zeros(rows, dtype=np.int32)
        self.num_reused = np.zeros(rows, dtype=np.int32)
        self.in_flight = np.zeros(rows, dtype=np.int32)
        self.alive = np.zeros(rows, dtype=np.bool_)
        self.limit = np.zeros(rows, dtype=np.int32)
        self.stop_from = np.zeros(rows, dtype=np.int32)
        self.stop_ids = np.full((rows, 4), -1, dtype=np.int32)
        self.stop_counts: dict[int, int] = {}  # running requests that each id ends
        self.block_table = np.zeros((rows, self.max_blocks), dtype=np.int32)
        self.num_blocks = np.zeros(rows, dtype=np.int32)
        self.num_hashes = np.zeros(rows, dtype=np.int32)
        self.adapter_slots = np.full(rows, -1, dtype=np.int32)
        self.num_adapted = 0
        self.temperature = np.zeros(rows, dtype=np.float32)
        self.top_p = np.ones(rows, dtype=np.float32)
        self.min_p = np.zeros(rows, dtype=np.float32)
        self.top_k = np.zeros(rows, dtype=np.int32)
        self.seed = np.zeros(rows, dtype=np.int64)
        # Running requests that sample at random, that filter, that have a min_tokens: none of a kind, no work for it.
        self.num_random = self.num_filtered = self.num_held = 0
        self.request_ids = np.full(rows, "", dtype=object)
        self.requests: list[Request | None] = [None] * rows
        self.extras = ExtraRows(rows)
        self._free_rows = list(range(rows - 1, -1, -1))

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    def add(self, request: Request, num_reused: int, num_computed: int) -> int:
        """Give `request` a row; returns it."""
        row = self._free_rows.pop()
        params = request.params
        total = len(request.token_ids)
        self.tokens[row, :total] = request.token_ids
        self.num_tokens[row] = self.num_known[row] = total
        self.alive[row] = True
        self.num_computed[row] = self.num_settled[row] = num_computed
        self.num_reused[row] = num_reused
        self.limit[row] = request.limit
        self.stop_from[row] = request.num_prompt + params.min_tokens
        if len(request.stop_ids) > self.stop_ids.shape[1]:
            wider = np.full((len(self.stop_ids), len(request.stop_ids)), -1, dtype=np.int32)
            wider[:, : self.stop_ids.shape[1]] = self.stop_ids
            self.stop_ids = wider
        self.stop_ids[row] = -1
        self.stop_ids[row, : len(request.stop_ids)] = request.stop_ids
        self.num_blocks[row] = 0
        self.num_hashes[row] = len(request.hashes)
        self.temperature[row] = 0.0 if params.greedy else params.temperature
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.top_k[row] = params.top_k
        self.seed[row] = request.seed
        self.request_ids[row] = request.request_id
        self.requests[row] = request
        request.row = row
        self._count(request, 1)
        self.extras.add(row, request)
        return row

    def adapt(self, row: int, slot: int) -> None:
        """The row's request has its adapter in `slot`."""
        self.adapter_slots[row] = slot
        self.num_adapted += 1

    def remove(self, request: Request) -> None:
        """Take the request's tokens back out of its row and free the row, which no launched step may name."""
        row = request.row
        self._count(request, -1)
        self.extras.remove(row, request)
        request.token_ids = self.tokens[row, : self.num_known[row]].copy()
        request.row = -1
        self.requests[row] = None
        self.request_ids[row] = ""
        self.num_tokens[row] = self.num_known[row] = self.num_computed[row] = 0
        self.alive[row] = False
        if request.adapter is not None:
            self.adapter_slots[row] = -1
            self.num_adapted -= 1
        self._free_rows.append(row)

    def _count(self, request: Request, by: int) -> None:
        params = request.params
        for token_id in request.stop_ids:
            count = self.stop_counts.get(token_id, 0) + by
            if count:
                self.stop_counts[token_id] = count
            else:
                del self.stop_counts[token_id]
        self.num_held += by * (params.min_tokens > 0)
        if not params.greedy:
            self.num_random += by
            self.num_filtered += by * (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)
