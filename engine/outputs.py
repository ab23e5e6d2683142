"""What leaves the engine: tokens of a step as parallel lists, and how each request ended."""

from dataclasses import dataclass, field
from enum import StrEnum


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finished:
    """How a request ended, and what is counted of it.

    stop_token_id: the EOS or stop token that ended it; it is also the request's last token id, and no text.
    num_output_tokens: with those that the request came with, if it was resumed.
    num_cached_tokens: prompt tokens whose KV came from the prefix cache when the request was first admitted.
    lost: the engine ended under it, by no fault of the request's: another could go on with it.
    """

    request_id: str
    reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    stop_token_id: int | None = None
    error: str | None = None
    lost: bool = False


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log probabilities of a token and of the most likely ones in its place, by the model itself.

    token_ids, logprobs: the token's own first, then as many of the most likely as were asked for, falling; the token
        itself may be among these again.
    rank: the token's own; 1 is the most likely.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int


@dataclass(slots=True)
class StepOutput:
    """Tokens of one step: `token_ids[i]` belongs to `request_ids[i]`, in order.

    Parallel lists rather than an object a token: a step of 256 sequences makes one of these, and one message.

    logprobs: by the id of each request that asked for them, one entry for each of its tokens here, in order.
    prompt_logprobs: by request, one entry for each token of its prompt, None for the first; once in its life, with its
        first token or, if it makes none, with its end.
    cached_tokens: by request, `num_cached_tokens` of its end, where that is not 0; once, before its first token or with
        it: who stops reading before the end has been told.
    """

    request_ids: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprobs | None]] = field(default_factory=dict)
    cached_tokens: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Gauges and counters since start. Blocks: live + cached + free = total.

    waiting_tokens: to compute of the requests that wait, if the prefix cache has nothing of them. queue_age_s: how long
        the first of them has waited, when the statistics were taken.
    swap_out_bytes, swap_in_bytes: KV copied to the host, and back.
    adapter_loads: LoRA adapters that were brought to slots of the device.
    """

    num_running: int
    num_waiting: int
    total_blocks: int
    live_blocks: int
    cached_blocks: int
    free_blocks: int
    prompt_tokens: int
    cached_prompt_tokens: int
    generation_tokens: int
    preemptions: int
    steps: int
    slots_used: int
    """KV slots in live blocks that hold a token; over live_blocks x block_size this is the pool's fill."""
    waiting_tokens: int = 0
    queue_age_s: float = 0.0
    swap_out_bytes: int = 0
    swap_in_bytes: int = 0
    adapter_loads: int = 0
