"""Ranks that fail as they are told to: one without a model, which checks every KV slot, and one with a model."""

import itertools
import os
import time
from pathlib import Path
from typing import Any

from app.shard import Rank, load_rank
from engine.config import EngineConfig
from engine.runner import RankRunner
from engine.step import StepPlan, StepResult
from tests.scripted import ShadowRunner


class StandInRank(ShadowRunner):
    """config.model: a folder; a file there by the name of what is to go wrong, with the rank as text, makes it so."""

    def __init__(self, config: EngineConfig, rank: Rank, store: Any) -> None:
        super().__init__()
        self._folder, self._rank, self._store = Path(config.model), rank, store
        self._meetings = 0
        if self._told("start"):
            raise ValueError("made to fail at the start")
        (self._folder / f"rank-{rank.index}").write_text(str(os.getpid()))
        store.set(f"here {rank.index}", "")
        for other in range(rank.size):
            store.get(f"here {other}")

    def launch(self, plan: StepPlan) -> StepResult:
        if self._told("raise"):
            raise RuntimeError("made to fail")
        return super().launch(plan)

    def leave(self) -> bool:
        return not self._told("cannot go on")

    def meet_again(self, word: str) -> list[str]:
        self._meetings += 1
        self._store.set(f"{self._meetings} {self._rank.index}", word)
        return [self._store.get(f"{self._meetings} {other}").decode() for other in range(self._rank.size)]

    def _told(self, what: str) -> bool:
        file = self._folder / what
        return file.is_file() and file.read_text() == str(self._rank.index)


def lazy_rank(config: EngineConfig, rank: Rank, store: Any) -> RankRunner:
    """A rank of the model; if it is the last one, it leaves the others alone in their third step."""
    runner = load_rank(config, rank, store)
    if rank.index == rank.size - 1:
        launch, steps = runner.launch, itertools.count(1)

        def launch_or_hang(plan: StepPlan) -> Any:
            if next(steps) == 3:
                time.sleep(3600)
            return launch(plan)

        runner.launch = launch_or_hang
    return runner
