"""Runners without a model: one that emits what a script says, one that checks every KV slot it reads."""

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from engine.engine import Engine
from engine.runner import Runner, RunnerInfo, SwapInfo
from engine.step import Ints, Logprobs, PromptScores, StepPlan, StepResult


def runner_info(**overrides: object) -> RunnerInfo:
    values: dict[str, object] = {
        "num_blocks": 64,
        "block_size": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 16,
        "max_model_len": 128,
        "vocab_size": 384,
        "eos_token_ids": (2,),
        "device": "cpu",
        "dtype": "float32",
    }
    return RunnerInfo(**(values | overrides))


def swap_info(num_blocks: int, *, seconds_per_token: float = 1.0) -> SwapInfo:
    """Host memory to which a copy costs nothing, unless computing again does neither."""
    return SwapInfo(num_blocks, block_bytes=100, seconds_per_block=0.0, seconds_per_token=seconds_per_token)


class ScriptedRunner:
    """Every request gets the tokens of `script`, then its last one for ever.

    before_step is called ahead of each step: a place to wait, or to raise from.
    """

    def __init__(
        self, script: Sequence[int], *, before_step: Callable[[StepPlan], None] = lambda plan: None, **info: object
    ) -> None:
        self.info = runner_info(**info)
        self.script = list(script)
        self.before_step = before_step
        self.plans: list[StepPlan] = []
        self._given = np.zeros(self.info.max_num_seqs, dtype=int)

    def launch(self, plan: StepPlan) -> StepResult:
        self.before_step(plan)
        self.plans.append(plan)
        if plan.new_rows is not None:
            self._given[plan.new_rows.rows] = 0
        tokens = []
        for row in plan.rows[plan.sample].tolist():
            tokens.append(self.script[min(self._given[row], len(self.script) - 1)])
            self._given[row] += 1
        extras = plan.extras
        chosen = np.array(tokens, dtype=np.int64)
        if extras is None:
            return StepResult(chosen)
        scores = extras.prompt_scores
        return StepResult(
            chosen,
            None if extras.logprobs is None else self._logprobs(chosen[extras.logprobs], extras.num_top),
            None if scores is None else self._logprobs(scores.targets, scores.num_top),
        )

    def _logprobs(self, tokens: NDArray[np.integer], num_top: int) -> Logprobs:
        """Every token is the second in likelihood: -1.5, after its successor in the vocabulary, -0.5, and so on."""
        shifts = [0, 1, 0, *range(2, num_top)][: 1 + num_top]
        values = [-1.5, *(-0.5 - i for i in range(num_top))]
        ids = (tokens[:, None] + np.array(shifts)) % self.info.vocab_size
        return Logprobs(ids, np.tile(np.float32(values), (len(tokens), 1)), np.full(len(tokens), 2))

    def collect(self, ticket: StepResult) -> StepResult:
        return ticket

    def close(self) -> None:
        pass


RANKS = 1 << 20


def digest(previous: int, token_id: int) -> int:
    """The value of a KV slot: a hash of all tokens up to its own."""
    data = previous.to_bytes(8, "little") + int(token_id).to_bytes(4, "little")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def shadow_continuation(prompt: Sequence[int], num_tokens: int, vocab_size: int) -> list[int]:
    """What a `ShadowRunner` samples after `prompt` when all slots are right."""
    value, tokens = 0, list(prompt)
    for token_id in prompt:
        value = digest(value, token_id)
    for _ in range(num_tokens):
        tokens.append(value % vocab_size)
        value = digest(value, tokens[-1])
    return tokens[len(prompt) :]


def shadow_scores(prompt: Sequence[int]) -> list[int]:
    """The ranks that a `ShadowRunner` gives the prompt's tokens, from the second, when all slots are right."""
    value, ranks = 0, []
    for token_id in prompt[:-1]:
        value = digest(value, token_id)
        ranks.append(value % RANKS)
    return ranks


class ShadowRunner:
    """Each KV slot holds a hash of its prefix, read back through the block tables as attention would.

    A slot that was lost, overwritten, shared wrongly or read in the wrong place changes the sampled tokens.
    """

    def __init__(self, **info: object) -> None:
        self.info = runner_info(**info)
        size = self.info.num_blocks * self.info.block_size
        self.slots: list[int | None] = [None] * size
        swap = self.info.swap
        self.host_slots: list[int | None] = [None] * (swap.num_blocks * self.info.block_size if swap else 0)
        self.tables = np.full((self.info.max_num_seqs, -(-self.info.max_model_len // self.info.block_size)), -1)
        self.last_tokens = np.full(self.info.max_num_seqs, -1)
        self.max_tokens_in_a_step = 0
        self.fail_next = False

    def launch(self, plan: StepPlan) -> StepResult:
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("made to fail")
        if plan.copies is not None:
            self._copy(self.slots, plan.copies.out_blocks, self.host_slots, plan.copies.out_host)
            self._copy(self.host_slots, plan.copies.in_host, self.slots, plan.copies.in_blocks)
        assert (np.diff(plan.query_start) > 0).all(), "a sequence with nothing to compute"
        updates = plan.block_updates
        self.tables[updates.rows, updates.columns] = updates.blocks
        self.max_tokens_in_a_step = max(self.max_tokens_in_a_step, plan.num_tokens)
        for i, row in enumerate(plan.rows.tolist()):
            for at in range(int(plan.query_start[i]), int(plan.query_start[i + 1])):
                position = int(plan.positions[at])
                token_id = int(plan.token_ids[at])
                if token_id < 0:
                    assert plan.pending is not None
                    assert i in plan.pending
                    assert at == plan.query_start[i + 1] - 1
                    token_id = int(self.last_tokens[row])
                value = digest(self._read(row, position - 1) if position else 0, token_id)
                slot = int(plan.slots[at])
                if slot < 0:
                    assert self._read(row, position) == value, "a slot said to be filled holds something else"
                else:
                    assert slot == self._slot(row, position), "written where it will not be read"
                    self.slots[slot] = value
        lengths = plan.seq_lens[plan.sample]
        rows = plan.rows[plan.sample]
        tokens = [
            self._read(row, length - 1) % self.info.vocab_size
            for row, length in zip(rows.tolist(), lengths.tolist(), strict=True)
        ]
        self.last_tokens[rows] = tokens
        scores = None if plan.extras is None else plan.extras.prompt_scores
        return StepResult(
            np.array(tokens, dtype=np.int64), prompt_logprobs=None if scores is None else self._scores(plan, scores)
        )

    def _copy(self, source: list[int | None], blocks: Ints, target: list[int | None], places: Ints) -> None:
        size = self.info.block_size
        for block, place in zip(blocks.tolist(), places.tolist(), strict=True):
            target[place * size : (place + 1) * size] = source[block * size : (block + 1) * size]

    def _scores(self, plan: StepPlan, scores: PromptScores) -> Logprobs:
        """The rank of a prompt token is (some of) the hash of the tokens before it."""
        rows = np.repeat(plan.rows, np.diff(plan.query_start))[scores.at]
        ranks = [
            self._read(row, position) % RANKS
            for row, position in zip(rows.tolist(), plan.positions[scores.at].tolist(), strict=True)
        ]
        return Logprobs(
            scores.targets[:, None], np.zeros((len(ranks), 1), dtype=np.float32), np.array(ranks, dtype=np.int64)
        )

    def collect(self, ticket: StepResult) -> StepResult:
        return ticket

    def close(self) -> None:
        pass

    def _slot(self, row: int, position: int) -> int:
        return int(self.tables[row, position // self.info.block_size]) * self.info.block_size + (
            position % self.info.block_size
        )

    def _read(self, row: int, position: int) -> int:
        value = self.slots[self._slot(row, position)]
        assert value is not None, "read before it was written"
        return value


class LateRunner:
    """A runner whose device is slow: a step begins only when its result is asked for.

    So nothing that a launch needs may be changed between launch and collect, and nothing that it makes may be used.
    """

    def __init__(self, runner: Runner) -> None:
        self.info = runner.info
        self.runner = runner

    def launch(self, plan: StepPlan) -> StepPlan:
        return plan

    def collect(self, ticket: StepPlan) -> StepResult:
        return self.runner.collect(self.runner.launch(ticket))

    def close(self) -> None:
        self.runner.close()


def drain(engine: Engine, max_steps: int = 10_000) -> dict[str, list[int]]:
    """Step until nothing is left; the tokens of each request."""
    tokens: dict[str, list[int]] = {}
    for _ in range(max_steps):
        if not engine.has_work():
            return tokens
        output = engine.step()
        for request_id, token_id in zip(output.request_ids, output.token_ids, strict=True):
            tokens.setdefault(request_id, []).append(token_id)
    raise AssertionError(f"still busy after {max_steps} steps")
