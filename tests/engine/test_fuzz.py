"""Random lives of an engine: adds, chunks, preemptions, failures, and aborts at any point.

Each KV slot holds a hash of its prefix and every read is checked (`tests.scripted.ShadowRunner`). A failing run prints
the shortest sequence of calls that Hypothesis can find. `pytest --hypothesis-profile=thorough` runs thousands.
"""

import itertools
from types import SimpleNamespace
from typing import cast

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.engine import Engine
from engine.lora.adapter import Adapter
from engine.outputs import FinishReason, StepOutput
from engine.sampling_params import SamplingParams
from tests.scripted import LateRunner, ShadowRunner, shadow_continuation, shadow_scores, swap_info

VOCAB = 384
SHARED = [(3 + 7 * i) % VOCAB for i in range(24)]


class Lives(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.sampled_from([4, 8, 12, 40]),
        max_num_seqs=st.sampled_from([1, 3, 8]),
        budget=st.sampled_from([1, 3, 7, 16, 100]),
        caching=st.sampled_from([True, True, False]),
        chunked=st.sampled_from([True, True, False]),
        mode=st.sampled_from(["step by step", "two in flight", "late device"]),
        host_blocks=st.sampled_from([0, 3, 20]),
        tick_s=st.sampled_from([0.0, 1e-6, 5.0]),
    )
    def start(
        self,
        num_blocks: int,
        max_num_seqs: int,
        budget: int,
        caching: bool,
        chunked: bool,
        mode: str,
        host_blocks: int,
        tick_s: float,
    ) -> None:
        self.runner = ShadowRunner(
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=64,
            eos_token_ids=(),
            swap=swap_info(host_blocks) if host_blocks else None,
            max_loras=2,
        )
        self.host_blocks = host_blocks
        self.engine = Engine(
            LateRunner(self.runner) if mode == "late device" else self.runner,
            enable_prefix_caching=caching,
            enable_chunked_prefill=chunked,
            async_scheduling=mode != "step by step",
        )
        # The order of service goes by time: with the real one a run would be another when it is repeated.
        ticks = itertools.count()
        self.engine.scheduler.waiting._clock = lambda: tick_s * next(ticks)
        self.count = 0
        self.wanted: dict[str, list[int]] = {}
        self.usage: dict[str, tuple[int, int]] = {}
        self.got: dict[str, list[int]] = {}
        self.cut: set[str] = set()
        self.ended: set[str] = set()
        self.scores: dict[str, list[int]] = {}

    @rule(
        shared=st.integers(0, 24),
        own=st.lists(st.integers(0, 3), max_size=12),
        num_outputs=st.integers(1, 30),
        copies=st.integers(1, 3),
        resumed_after=st.integers(0, 5),
        stop_after=st.none() | st.integers(1, 8),
        priority=st.integers(-1, 1),
        tenant=st.sampled_from(["a", "a", "b"]),
        is_batch=st.booleans(),
        salt=st.sampled_from([None, None, "salt"]),
        extras=st.sampled_from([None, None, None, "scored", "scored only", "needs its last token"]),
        adapter=st.sampled_from([None, None, None, "aa", "bb", "cc"]),
    )
    def add(
        self,
        shared: int,
        own: list[int],
        num_outputs: int,
        copies: int,
        resumed_after: int,
        stop_after: int | None,
        priority: int,
        tenant: str,
        is_batch: bool,
        salt: str | None,
        extras: str | None,
        adapter: str | None,
    ) -> None:
        longest = self.engine.info.max_total_tokens
        prompt = (SHARED[:shared] + own or [1])[: longest - 1]
        whole = shadow_continuation(prompt, min(num_outputs, longest - len(prompt)), VOCAB)
        known = min(resumed_after, len(whole) - 1)
        stop_ids: tuple[int, ...] = ()
        if stop_after is not None and known + stop_after <= len(whole):
            stop_ids = (whole[known + stop_after - 1],)
            first = next(i for i, token_id in enumerate(whole) if i >= known and token_id in stop_ids)
            whole = whole[: first + 1]
        if extras == "scored only":
            whole, known, stop_ids, num_outputs = [], 0, (), 0
        params = SamplingParams(
            temperature=0.0,
            max_tokens=num_outputs,
            stop_token_ids=stop_ids,
            prompt_logprobs=0 if extras in ("scored", "scored only") else None,
            bad_words_token_ids=[[VOCAB - 1, 5]] if extras == "needs its last token" else (),
        )
        for _ in range(copies):
            name = str(self.count)
            self.count += 1
            self.engine.add_request(
                name,
                prompt,
                params,
                whole[:known],
                priority=priority,
                tenant=tenant,
                is_batch=is_batch,
                cache_salt=salt,
                adapter=None if adapter is None else cast("Adapter", SimpleNamespace(digest=adapter)),
            )
            self.wanted[name] = whole[known:]
            self.usage[name] = len(prompt), len(whole)
            self.got[name] = []
            if params.prompt_logprobs is not None and not known:
                self.scores[name] = shadow_scores(prompt)

    @rule(steps=st.integers(1, 4))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.take(self.engine.step())

    @precondition(lambda self: self.wanted)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.wanted, key=int)))
        finished = self.engine.abort(name)
        assert (finished is None) == (name in self.ended)
        if finished is not None:
            assert finished.num_output_tokens >= len(self.got[name])
            self.ended.add(name)
            self.cut.add(name)

    @precondition(lambda self: self.engine._failed_steps == 0)  # several in a row end the engine, as they should
    @rule()
    def fail_a_step(self) -> None:
        self.runner.fail_next = True
        self.take(self.engine.step())
        self.runner.fail_next = False

    def take(self, output: StepOutput) -> None:
        for name, token_id in zip(output.request_ids, output.token_ids, strict=True):
            assert name not in self.ended, "a token after the end"
            self.got[name].append(token_id)
        for name, entries in output.prompt_logprobs.items():
            assert [entry and entry.rank for entry in entries] == [None, *self.scores.pop(name)]
            assert len(self.got[name]) <= 1, "with its first token"
        for finished in output.finished:
            assert finished.request_id not in self.ended, "ended twice"
            self.ended.add(finished.request_id)
            if finished.reason is FinishReason.ERROR:
                self.cut.add(finished.request_id)
            else:
                assert self.got[finished.request_id] == self.wanted[finished.request_id]
                assert (finished.num_prompt_tokens, finished.num_output_tokens) == self.usage[finished.request_id]
                assert finished.request_id not in self.scores, "ended without its scores"

    @invariant()
    def books_balance(self) -> None:
        blocks = self.engine.scheduler.blocks
        assert blocks.num_live + blocks.num_cached + blocks.num_free == blocks.num_blocks
        assert 0 <= self.engine.stats().slots_used <= blocks.num_live * self.engine.info.block_size

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.runner.fail_next = False
        for _ in range(5000):
            if not self.engine.has_work():
                break
            self.take(self.engine.step())
        assert not self.engine.has_work(), "requests that never end"
        for name, wanted in self.wanted.items():
            got = self.got[name]
            assert got == (wanted[: len(got)] if name in self.cut else wanted)
        stats = self.engine.stats()
        assert stats.live_blocks == 0
        assert stats.num_waiting == stats.num_running == 0
        assert self.engine.scheduler.batch.num_free_rows == self.engine.info.max_num_seqs
        if self.host_blocks:
            assert self.engine.scheduler.swap.num_free == self.host_blocks


TestLives = Lives.TestCase
