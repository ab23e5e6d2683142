"""Which requests get how many tokens this step.

There is one kind of step. A request knows `num_tokens` and has computed `num_computed` of them; a step gives it some
of the difference, under one budget. Running requests come first, those that need one token (decodes) before those that
need more (prompts, in chunks); then waiting requests are admitted while blocks, rows and budget last. When blocks run
out, the request that is last in the order of service is preempted: it gives all its blocks back and waits, and what it
had is found again in the prefix cache or recomputed. Others are preempted for one that waits (`giving_way`).

A step may be planned while others are in flight (planned, not committed): a sampled token that is not known yet is
planned for as PENDING. What ended meanwhile keeps its row and blocks for a while (`in_flight`).

A request whose choices depend on its last token (`Request.needs_last_token`) is left out of a step that would be
planned ahead of it, and goes on when that is known.

Pure bookkeeping on numpy arrays: no torch, no model; `commit` takes the sampled token ids.
"""

import time
from collections.abc import Callable

import numpy as np

from engine.block_manager import BlockManager
from engine.lora.slots import AdapterSlots
from engine.outputs import Finished, FinishReason, StepOutput
from engine.request import Request, Status
from engine.runner import SwapInfo
from engine.scheduling.batch import PENDING, Batch
from engine.scheduling.giving_way import GivingWay
from engine.scheduling.in_flight import InFlight
from engine.scheduling.intake import Intake
from engine.scheduling.logprobs import hand_out
from engine.scheduling.plan_builder import PlanBuilder
from engine.scheduling.running import Running
from engine.scheduling.streak import Streaks
from engine.scheduling.swap_space import SwapSpace
from engine.scheduling.waiting import WaitingQueue
from engine.step import Ints, StepPlan, StepResult


class Scheduler:
    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_total_tokens: int,
        enable_chunked_prefill: bool = True,
        enable_prefix_caching: bool = True,
        swap: SwapInfo | None = None,
        max_loras: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # Every running request gets at least one token a step, so no more may run than the budget has tokens.
        self.max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
        self.block_size = block_size
        self.budget = max_num_batched_tokens
        self.max_total_tokens = max_total_tokens
        self.enable_chunked_prefill = enable_chunked_prefill
        self.blocks = BlockManager(num_blocks, enable_prefix_caching)
        self.batch = Batch(self.max_num_seqs, max_total_tokens, block_size)
        self.adapters = AdapterSlots(max_loras)
        self._plans = PlanBuilder(self.batch, self.adapters)
        self.swap = None if swap is None else SwapSpace(swap, self.batch, self.blocks, self._plans)
        self.requests: dict[str, Request] = {}
        self.waiting = WaitingQueue(clock)
        self._running = Running(self.batch, self.blocks, self._plans, self.adapters)
        self.intake = Intake(self.batch, self.blocks, self.waiting, self._running, self.swap)
        self._giving_way = GivingWay(self.batch, self.waiting, self._running, self.intake)
        self._in_flight = InFlight(self.batch, self._running)
        self._streaks = Streaks(self.batch)
        self.num_preemptions = 0
        self.num_generated_tokens = 0

    # -- requests in and out ------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. Its length has been checked against `max_total_tokens`."""
        if self.blocks.enable_prefix_caching:
            request.extend_hashes(request.token_ids, self.block_size, len(request.token_ids) // self.block_size)
        else:
            request.hashes = []  # or it would wait for blocks that others compute, and never find them
        self.requests[request.request_id] = request
        self.waiting.arrive(request)

    def abort(self, request_id: str) -> Finished | None:
        """End a request wherever it is; None if there is no such request (any more)."""
        return self.finish(request_id, FinishReason.ABORT)

    def finish(
        self,
        request_id: str,
        reason: FinishReason,
        stop_token_id: int | None = None,
        error: str | None = None,
    ) -> Finished | None:
        """End a request. What it holds is given back now, or with the last step in flight that names it."""
        request = self.requests.pop(request_id, None)
        if request is None:
            return None
        self._end_streak()
        num_known = len(request.token_ids)
        if request.status is Status.RUNNING:
            num_known = int(self.batch.num_known[request.row])
            self._stop(request)
            self._in_flight.end(request)
        else:
            self.waiting.remove(request)
            if self.swap is not None:
                self.swap.forget(request)
        request.status = Status.FINISHED
        return Finished(
            request_id=request_id,
            reason=reason,
            num_prompt_tokens=request.num_prompt,
            num_output_tokens=num_known - request.num_prompt,
            num_cached_tokens=request.num_cached_tokens or 0,
            stop_token_id=stop_token_id,
            error=error,
        )

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    def slots_used(self) -> int:
        """KV slots in live blocks that hold a token. Only a request's last block, its own alone, can be part empty."""
        rows = self._running.rows()
        streak = self._streaks.current
        computed = self.batch.num_computed[rows] if streak is None else streak.num_computed
        filled = np.maximum(computed, self.batch.num_reused[rows])
        empty = self.batch.num_blocks[rows].sum() * self.block_size - filled.sum()
        return self.blocks.num_live * self.block_size - int(empty)

    # -- one step -----------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """Plan the next step; None when there is nothing to run, or not before a step in flight is settled.

        `commit` or `fail` must follow for each plan, in order.
        """
        batch = self.batch
        plan = self._quiet_plan()
        if plan is not None:
            return plan
        rows = self._running.rows()
        computed = batch.num_computed[rows]
        counts, budget = self._share_budget(rows, computed)
        preemptions = self.num_preemptions
        if not self._grow(rows, computed, counts):
            return None
        if self.num_preemptions > preemptions:
            rows, counts = rows[batch.alive[rows]], counts[batch.alive[rows]]
        # What was just preempted would only come back to be preempted again.
        elif self.waiting:
            if (request := self._giving_way.who(budget)) is not None:
                if self._in_flight.steps:
                    return None
                self._preempt(request)
                alive = batch.alive[rows]
                rows, computed, counts = rows[alive], computed[alive], counts[alive]
                budget = self.budget - int(counts.sum())
            if budget > 0 and batch.num_free_rows:
                rows, counts = self._admit(rows, computed, counts, budget)
        if not counts.all():
            rows, counts = rows[counts > 0], counts[counts > 0]
        if not len(rows):
            return None
        plan = self._plans.plan(rows, counts, in_flight=bool(self._in_flight.steps))
        self._advance(plan, plan.seq_lens - counts)
        all_decode = plan.rows is self._running.order and plan.num_tokens == len(plan.sample) == len(rows)
        self._streaks.last_decode = plan if all_decode else None
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> StepOutput:
        """Take in the oldest step's result. Returns the tokens and the requests that ended."""
        batch = self.batch
        if self._streaks.current is not None:
            output = self._streaks.current.take(result.token_ids)
            if output is not None:
                self.num_generated_tokens += len(output.token_ids)
                return output
            self._end_streak()
        first = batch.num_settled[plan.rows] // self.block_size
        last = plan.seq_lens // self.block_size
        batch.num_settled[plan.rows] = plan.seq_lens
        if self.blocks.enable_prefix_caching:
            done = np.flatnonzero((first != last) & batch.alive[plan.rows])
            if len(done):
                self._running.register(plan.rows[done], first[done], last[done])
        some_ended = bool(self._in_flight.ended)  # while this step was in flight
        self._in_flight.settle(plan)

        rows, positions = plan.rows, plan.seq_lens
        if len(plan.sample) < len(rows):
            rows, positions = rows[plan.sample], positions[plan.sample]
        ids = result.token_ids.astype(np.int32, copy=False)
        if some_ended:
            alive = batch.alive[rows]
            rows, positions, ids = rows[alive], positions[alive], ids[alive]
        batch.tokens[rows, positions] = ids
        num_tokens = positions + 1
        batch.num_known[rows] = num_tokens
        output = StepOutput(batch.request_ids[rows].tolist(), ids.tolist())
        ended = num_tokens >= batch.limit[rows]
        stopped = None
        if not batch.stop_counts.keys().isdisjoint(output.token_ids):
            stopped = (batch.stop_ids[rows] == ids[:, None]).any(axis=1) & (num_tokens >= batch.stop_from[rows])
            ended |= stopped
        self.num_generated_tokens += len(ids)
        if self.intake.found and len(ids):  # an output without tokens need not be delivered
            output.cached_tokens, self.intake.found = self.intake.found, {}
        if plan.extras is not None:
            hand_out(plan, result, batch, output)
            self._end_scored(plan, output)
        ends = batch.extras.follow(rows, ids) if batch.extras.num_matchers else {}
        for i in sorted({*np.flatnonzero(ended).tolist(), *ends}):
            error = ends.get(i)
            by_token = stopped is not None and bool(stopped[i])
            reason = FinishReason.STOP if by_token or i in ends else FinishReason.LENGTH
            stop_id = output.token_ids[i] if by_token else None
            finished = self.finish(output.request_ids[i], FinishReason.ERROR if error else reason, stop_id, error)
            assert finished is not None
            output.finished.append(finished)
        return output

    def _end_scored(self, plan: StepPlan, output: StepOutput) -> None:
        """End the requests that wanted their prompt scored and no token made."""
        rows = plan.rows[self.batch.extras.scores_only[plan.rows] & (plan.seq_lens == self.batch.num_tokens[plan.rows])]
        for row in rows[self.batch.alive[rows]].tolist():
            finished = self.finish(self.batch.request_ids[row], FinishReason.LENGTH)
            assert finished is not None
            output.finished.append(finished)

    def fail(self, plan: StepPlan, error: str) -> list[Finished]:
        """End the requests of the oldest step, whose result never came. No other step may be on the device any more.

        Steps behind it built on it, and what it told the device may never have arrived; so their results are dropped,
        and every other running request starts again from what is known of it. Nothing that others can see is lost: KV
        of these steps has not been registered in the prefix cache, and a cached block is never written. Copies to the
        host may not have been made, so those who wait for theirs compute again.
        """
        self._end_streak()
        ids: list[str] = self.batch.request_ids[plan.rows].tolist()
        while self._in_flight.steps:
            self._in_flight.settle(self._in_flight.steps[0][0])
        failed = [self.finish(request_id, FinishReason.ERROR, error=error) for request_id in ids]
        for request in list(self._running.requests):
            self._start_again(request)
        self.adapters.forget()
        if self.swap is not None:
            for request in self.requests.values():
                self.swap.forget(request)
        return [finished for finished in failed if finished is not None]

    # -- quiet steps, see `engine.scheduling.streak` ------------------------------------------------------------

    def _quiet_plan(self) -> StepPlan | None:
        streaks = self._streaks
        if streaks.current is None:
            if self._in_flight.steps or self.waiting or not streaks.may_begin(self._running.order):
                return None
            return streaks.begin()
        # A newcomer must be looked at, and one plan of a streak is out at a time.
        plan = None if self.waiting or streaks.current.plan is not None else streaks.current.next()
        if plan is None:
            self._end_streak()
        return plan

    def _end_streak(self) -> None:
        if self._streaks.current is not None:
            plan = self._streaks.end()
            if plan is not None:
                self._in_flight.steps.append((plan, set()))

    # -- inside a step ------------------------------------------------------------------------------------------

    def _share_budget(self, rows: Ints, computed: Ints) -> tuple[Ints, int]:
        """Tokens for each of the running `rows`, of which `computed` are done, and what is left of the budget."""
        batch = self.batch
        num_tokens = batch.num_tokens[rows]
        counts = num_tokens - computed
        if self._in_flight.steps:
            counts[num_tokens >= batch.limit[rows]] = 0  # the last token is on its way: nothing comes after it
            if batch.extras.num_users:
                counts[batch.extras.needs_last_token[rows] & (batch.num_known[rows] < num_tokens)] = 0
        prompts = np.flatnonzero(counts > 1)
        if not len(prompts):
            return counts, self.budget - int(counts.sum())
        budget = self.budget - int((counts == 1).sum())
        for i in prompts.tolist():
            counts[i] = count = self._chunk(int(counts[i]), budget)
            budget -= count
        return counts, budget

    def _chunk(self, need: int, budget: int) -> int:
        """Tokens of a prompt that has `need` to go."""
        if need <= budget:
            return need
        return budget if self.enable_chunked_prefill else 0

    def _grow(self, rows: Ints, computed: Ints, counts: Ints) -> bool:
        """Find the blocks that the counted tokens need, by preemption if need be.

        False if that must wait for steps in flight: blocks that they use cannot change hands.
        """
        blocks = (computed + counts + (self.block_size - 1)) // self.block_size
        short = np.flatnonzero(blocks > self.batch.num_blocks[rows])
        for row, num_blocks in zip(rows[short].tolist(), blocks[short].tolist(), strict=True):
            request = self.batch.requests[row]
            if request is None:  # preempted for a request before it
                continue
            while request.status is Status.RUNNING and not self._running.fill(request, num_blocks):
                if self._in_flight.steps:
                    return False
                self._preempt(self._running.last_in_service())
        return True

    def _preempt(self, request: Request) -> None:
        self.num_preemptions += 1
        if self.swap is not None:
            self.swap.copy_out(request)  # no step is in flight, so all that it has computed is there
        self._start_again(request)

    def _stop(self, request: Request) -> None:
        self._giving_way.charge(request)
        self._running.stop(request)

    def _start_again(self, request: Request) -> None:
        """Take everything from a running request but its tokens, and let it wait."""
        self._stop(request)
        self._running.release(request)
        request.forget_scores()
        self.waiting.push(request)

    def _admit(self, rows: Ints, computed: Ints, counts: Ints, budget: int) -> tuple[Ints, Ints]:
        """Start waiting requests beside the running `rows`; returns rows and counts with theirs."""
        computing = self._running.being_computed(rows, computed, computed + counts)
        computing.update(*(digests for _, digests in self._in_flight.steps))
        new_rows, new_counts = self.intake.admit(budget, self._chunk, computing)
        if not new_rows:
            return rows, counts
        return (
            np.concatenate((rows, np.array(new_rows, dtype=np.int32))),
            np.concatenate((counts, np.array(new_counts, dtype=np.int32))),
        )

    def _advance(self, plan: StepPlan, start: Ints) -> None:
        """Take the plan's effect for granted, so that the next one can be made. start: tokens computed before it."""
        batch = self.batch
        # The digest of a block that ends in a token which the last step sampled is not known yet.
        computing = set() if self._plans.repeats else self._running.being_computed(plan.rows, start, plan.seq_lens)
        batch.num_computed[plan.rows] = plan.seq_lens
        batch.in_flight[plan.rows] += 1
        rows, positions = plan.rows[plan.sample], plan.seq_lens[plan.sample]
        batch.tokens[rows, positions] = PENDING
        batch.num_tokens[rows] = positions + 1
        self._in_flight.steps.append((plan, computing))
