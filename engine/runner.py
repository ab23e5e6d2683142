"""What the engine asks of whatever computes a step: a model on this device, shards of it, or a stand-in."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from engine.step import StepPlan, StepResult

if TYPE_CHECKING:
    from engine.lora.adapter import Adapter


@dataclass(frozen=True, slots=True)
class SwapInfo:
    """Host memory for the KV of preempted requests, in blocks, and what the runner has measured of its worth.

    seconds_per_block: to copy one block one way. seconds_per_token: to compute one token again, in a full step.
    """

    num_blocks: int
    block_bytes: int
    seconds_per_block: float
    seconds_per_token: float


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """What the scheduler must know of the runner. Lengths in tokens.

    max_loras: adapters that a batch may have; 0 if the runner takes none. read_adapter: reads one from its folder.
    """

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    device: str
    dtype: str
    swap: SwapInfo | None = None
    max_loras: int = 0
    read_adapter: "Callable[[Path], Adapter] | None" = None


class Runner(Protocol):
    """Launch a step, collect its tokens. Steps are collected in the order of their launch.

    launch may return before the device has done anything; collect waits for it.
    """

    @property
    def info(self) -> RunnerInfo: ...

    def launch(self, plan: StepPlan) -> Any:
        """Start a step; returns a ticket for `collect`."""

    def collect(self, ticket: Any) -> StepResult:
        """The tokens that the step sampled, and what else its plan asked for."""

    def close(self) -> None:
        """Give back memory and processes; idempotent."""


class RankRunner(Runner, Protocol):
    """What computes on one of several ranks, all of which run the same steps."""

    def leave(self) -> bool:
        """A step failed here: let the other ranks know, so that they wait for nothing more of it. False where they
        cannot be told, and the group is lost."""

    def meet_again(self, word: str) -> list[str]:
        """Begin anew with the other ranks, each of which comes here once it has done with that step; all ranks' words,
        in their order. Raises where one does not come. What plans have told this rank before need not hold any more.
        """
