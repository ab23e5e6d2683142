"""Engines whose model several ranks share, for tests: rank 0 schedules and sends its plans, the others follow."""

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.lora.cache import AdapterCache
from engine.model_runner import ModelRunner
from engine.parallel.group import ParallelGroup
from engine.runner_setup import load_runner
from engine.step import StepPlan
from engine.structured.vocabulary import grammar_vocabulary
from engine.text.tokenizer import load_tokenizer
from tests.ranks import run_ranks

DEFAULTS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_gpu_blocks_override": 128, "num_threads": 1}


@dataclass(frozen=True)
class Case:
    """scenario: what rank 0 does with the engine; its result is the case's."""

    path: Path
    scenario: Callable[[Engine], Any]
    settings: dict[str, Any] = field(default_factory=dict)


def run_cases(size: int, cases: Sequence[Case]) -> list[Any]:
    """What the scenarios of all cases return, one after another on the same ranks; `size` 1: here, on one."""
    if size == 1:
        return [case.scenario(_engine(case, None)) for case in cases]
    return run_ranks(size, _run_all, cases)[0]


class _Leader:
    """A runner that sends what it launches ahead to the other ranks."""

    def __init__(self, runner: ModelRunner, group: ParallelGroup) -> None:
        self.runner = runner
        self.info = runner.info
        self.model = runner.model
        self._group = group

    def launch(self, plan: StepPlan) -> Any:
        _send(self._group, plan)
        return self.runner.launch(plan)

    def collect(self, ticket: Any) -> Any:
        return self.runner.collect(ticket)

    def close(self) -> None:
        _send(self._group, None)


def _engine(case: Case, group: ParallelGroup | None) -> Engine:
    size = 1 if group is None else group.size
    config = EngineConfig.from_kwargs(model=str(case.path), tensor_parallel_size=size, **(DEFAULTS | case.settings))
    runner = load_runner(config, case.path, group)
    return Engine(
        runner if group is None else _Leader(runner, group),
        model_path=case.path,
        async_scheduling=bool(config.async_scheduling),
        adapters=None if runner.info.read_adapter is None else AdapterCache(runner.info.read_adapter, config.max_loras),
        read_vocabulary=lambda: grammar_vocabulary(load_tokenizer(case.path), runner.info.vocab_size),
    )


def _run_all(group: ParallelGroup, cases: Sequence[Case]) -> list[Any]:
    results = []
    for case in cases:
        if group.rank == 0:
            engine = _engine(case, group)
            results.append(case.scenario(engine))
            engine.close()
        else:
            _follow(group, case)
    return results


def _follow(group: ParallelGroup, case: Case) -> None:
    config = EngineConfig.from_kwargs(
        model=str(case.path), tensor_parallel_size=group.size, **(DEFAULTS | case.settings)
    )
    runner = load_runner(config, case.path, group)
    while (plan := _received(group)) is not None:
        result = runner.collect(runner.launch(plan))
        assert len(result.token_ids) == len(plan.sample)
        assert result.logprobs is None


def _send(group: ParallelGroup, plan: StepPlan | None) -> None:
    message = torch.frombuffer(bytearray(pickle.dumps(plan)), dtype=torch.uint8)
    group.broadcast(torch.tensor([len(message)]))
    group.broadcast(message)


def _received(group: ParallelGroup) -> StepPlan | None:
    length = int(group.broadcast(torch.zeros(1, dtype=torch.int64)))
    return pickle.loads(group.broadcast(torch.empty(length, dtype=torch.uint8)).numpy().tobytes())
