"""A step that fails on some of the ranks: its requests end, and the ranks go on together, or the group ends."""

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import EngineDeadError
from engine.model_runner import ModelRunner
from engine.outputs import FinishReason, StepOutput
from engine.parallel.group import ParallelGroup
from engine.parallel.host_exchange import HostExchange
from engine.remote.runner import RemoteRunner, serve_rank
from engine.remote.shm_ring import Ring, RingReader, RingWriter
from engine.runner_setup import load_runner
from engine.sampling_params import SamplingParams
from engine.step import StepPlan
from tests import tiny_models
from tests.engine.sharded import DEFAULTS
from tests.ranks import run_ranks

POISON = 377
PROMPTS = {name: [(7 + 5 * i + 11 * j) % 370 + 3 for j in range(40)] for i, name in enumerate(("runs", "waits", "new"))}
PARAMS = SamplingParams(temperature=0.8, seed=4, max_tokens=20, ignore_eos=True)


@dataclass(frozen=True)
class Fault:
    """What a prompt with POISON does on a rank (None: on all): an exception before, at or behind an exchange of its
    step, the third sum or another."""

    where: str
    rank: int | None = None


FAULTS = [
    Fault("start"),
    Fault("start", rank=0),
    Fault("start", rank=1),
    Fault("all_reduce", rank=0),
    Fault("all_reduce", rank=1),
    Fault("all_reduce"),
    Fault("gather", rank=1),
    Fault("broadcast", rank=0),
    Fault("end", rank=0),
]


class Harm:
    """Makes the fault happen. What it replaces is there again after `undo`."""

    def __init__(self, fault: Fault, runner: ModelRunner, group: ParallelGroup) -> None:
        self.fault, self.runner, self.group, self.launch = fault, runner, group, runner.launch
        self.left = -1  # exchanges of the kind until the exception; below 0: none
        if fault.rank in (None, group.rank):
            runner.launch = self.harmed
            if fault.where in ("all_reduce", "gather", "broadcast"):
                self.exchange = getattr(group, fault.where)
                setattr(group, fault.where, self.count)

    def harmed(self, plan: StepPlan) -> Any:
        poisoned = POISON in plan.token_ids
        if poisoned and self.fault.where == "start":
            raise RuntimeError("made to fail")
        self.left = (2 if self.fault.where == "all_reduce" else 0) if poisoned else -1
        ticket = self.launch(plan)
        if poisoned and self.fault.where == "end":
            raise RuntimeError("made to fail")
        return ticket

    def count(self, *args: Any) -> Any:
        self.left -= 1
        if self.left == -1:
            raise RuntimeError("made to fail")
        return self.exchange(*args)

    def undo(self) -> None:
        self.group.__dict__.pop(self.fault.where, None)
        self.runner.__dict__.pop("launch", None)


def serve(
    group: ParallelGroup, path: Path, faults: list[Fault], asynchronous: bool = False, apart: bool = False
) -> list[Any]:
    """Rank 0 leads, beside its own steps; what it saw of each fault, the others nothing. apart: the ranks share no
    memory, as if they were on several hosts."""
    if apart:
        HostExchange.meet = lambda *_: None
        assert group._exchange is not None
        group._exchange.close()
        group._exchange = None
    config = EngineConfig.from_kwargs(
        model=str(path), tensor_parallel_size=group.size, max_num_seqs=2, max_num_batched_tokens=16, **DEFAULTS
    )
    runner = load_runner(config, path, group)
    results = []
    for i, fault in enumerate(faults):
        harm = Harm(fault, runner, group)
        if group.rank > 0:
            plans = Ring.open(group._store.get(f"plans {i}").decode())
            serve_rank(runner, RingReader(plans, group.rank), None)
        else:
            plans, answers = Ring.create(group.size), Ring.create(1)
            group._store.set(f"plans {i}", plans.address)
            args = runner, RingReader(plans, 0), RingWriter(answers)
            rank = threading.Thread(target=serve_rank, args=args, daemon=True)
            rank.start()
            remote = RemoteRunner(runner.info, [RingWriter(plans)], RingReader(answers, 0), 20.0)
            results.append(meet_fault(Engine(remote, async_scheduling=asynchronous)))
            remote.lost = None  # else the ranks are to be killed
            remote.close()
            rank.join(20.0)
        harm.undo()
    return results


def meet_fault(engine: Engine) -> tuple[dict[str, list[int]], dict[str, str | None], int] | str:
    """One request runs, one comes that is poison, one waits for a place, one comes when it is over. Their tokens, how
    those ended that failed, and the blocks that are live then; or what ended the engine."""
    tokens: dict[str, list[int]] = {}
    failed: dict[str, str | None] = {}

    def take(output: StepOutput) -> None:
        for name, token in zip(output.request_ids, output.token_ids, strict=True):
            tokens.setdefault(name, []).append(token)
        failed.update((ended.request_id, ended.error) for ended in output.finished if ended.error)
        assert all(ended.reason is FinishReason.LENGTH for ended in output.finished if not ended.error)

    engine.add_request("runs", PROMPTS["runs"], PARAMS)
    for _ in range(8):
        take(engine.step())
    engine.add_request("poison", [*PROMPTS["runs"][:32], *range(5, 15), POISON], PARAMS)
    engine.add_request("waits", PROMPTS["waits"], PARAMS)
    try:
        while engine.has_work():
            take(engine.step())
        engine.add_request("again", PROMPTS["runs"], PARAMS)
        engine.add_request("new", PROMPTS["new"], PARAMS)
        while engine.has_work():
            take(engine.step())
    except EngineDeadError as error:
        return str(error)
    return tokens, failed, engine.stats().live_blocks


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, list[int]]:
    """Of one rank that nothing happens to."""
    engine = Engine.from_config(EngineConfig.from_kwargs(model=str(model), **DEFAULTS))
    tokens: dict[str, list[int]] = {}
    for name, prompt in PROMPTS.items():
        engine.add_request(name, prompt, PARAMS)
        while engine.has_work():
            tokens.setdefault(name, []).extend(engine.step().token_ids)
    return tokens


@pytest.mark.parametrize(
    ("faults", "asynchronous", "apart", "compiled"),
    [
        (FAULTS, False, False, True),
        (FAULTS[4:], True, False, True),
        (FAULTS[3:], True, True, True),
        (FAULTS[3:5], False, False, False),
    ],
    ids=["one step in flight", "two", "on several hosts", "no compiler"],
)
def test_ranks_go_on_after_a_step_that_failed(
    model: Path, expected: dict[str, list[int]], faults: list[Fault], asynchronous: bool, apart: bool, compiled: bool
) -> None:
    results = run_ranks(2, serve, model, faults, asynchronous, apart, compiled=compiled)[0]
    for fault, result in zip(faults, results, strict=True):
        assert not isinstance(result, str), (fault, result)
        tokens, failed, live = result
        assert failed == dict.fromkeys(("runs", "poison"), "StepFailedError in a step of the engine"), fault
        for name, others in (("waits", "waits"), ("again", "runs"), ("new", "new")):
            assert tokens[name] == expected[others], (fault, name)
        assert live == 0


def test_three_ranks_of_which_two_only_wait(model: Path, expected: dict[str, list[int]]) -> None:
    faults = [Fault("all_reduce", rank=2), Fault("start", rank=1)]
    model = tiny_models.llama(model.parent / "six", num_attention_heads=6, num_key_value_heads=3, hidden_size=96)
    for result in run_ranks(3, serve, model, faults)[0]:
        assert not isinstance(result, str), result
        tokens, failed, live = result
        assert (failed.keys(), live) == ({"runs", "poison"}, 0)
        assert tokens["again"][: len(tokens["runs"])] == tokens["runs"]


def test_a_rank_that_failed_behind_tokens_that_are_out_ends_the_group(model: Path) -> None:
    """Its KV of that step cannot be known."""
    (result,) = run_ranks(2, serve, model, [Fault("end", rank=1)])[0]
    assert result == "shard 1: RuntimeError('made to fail') (in a step whose tokens were out already)"
