"""What the ingress asks of the engine, and in which words: one small interface, whatever carries it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from app.openai.errors import ApiError, EngineFault
from engine.lora.request import LoRARequest
from engine.outputs import EngineStats, Finished, StepOutput, TokenLogprobs
from engine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What the ingress must know of the engine. max_total_tokens: prompt plus output of one request. kv_tokens: of all
    that run at once."""

    max_total_tokens: int
    max_num_seqs: int
    block_size: int
    vocab_size: int
    kv_tokens: int


@dataclass(frozen=True, slots=True)
class Submission:
    """One request as the engine replica takes it.

    output_ids: tokens that it has delivered already; it goes on after them.
    block_hashes: digests of the prompt's full blocks; a router reads them too.
    tenant, priority, is_batch: who asked, and how urgent it is; see `engine.scheduling.waiting`.
    session: what the client calls its conversation; those of one session go to one replica if they can.
    lora: the adapter that it runs with; the block hashes are of that too.
    """

    request_id: str
    prompt_ids: Sequence[int]
    params: SamplingParams
    output_ids: Sequence[int] = ()
    block_hashes: list[bytes] | None = None
    cache_salt: str | None = None
    priority: int = 0
    tenant: str = ""
    is_batch: bool = False
    session: str | None = None
    lora: LoRARequest | None = None


@dataclass(slots=True)  # not frozen, which would make it three times as slow to make, for each token
class Delivery:
    """New tokens of one request, from one step or from several; the last delivery says how it ended.

    logprobs: one entry for each of token_ids, if the request asked for them. prompt_logprobs: once, if asked for.
    cached_tokens: prompt tokens that came from the prefix cache; in the first delivery at the latest, else 0.
    """

    token_ids: list[int]
    finished: Finished | None = None
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Refusal:
    """The engine would not take the request. Data and not an exception, which would cross processes with loss."""

    message: str
    param: str | None
    code: str
    status: int = 400

    def to_error(self) -> ApiError:
        return ApiError(self.status, self.message, param=self.param, code=self.code)


@dataclass(frozen=True, slots=True)
class Placed:
    """The engine has taken the request; the first message of its call.

    replica: which engine it is. carrier: the number, at that engine, of the call over which its tokens come.
    carries: whether that is this call.
    """

    replica: str
    carrier: int
    carries: bool


@dataclass(frozen=True, slots=True)
class Holding:
    """What a replica answers to one that has heard nothing for a while: its name, and the ids of its requests.

    sent: how many messages its open carriers have for their ingresses so far, by the numbers of the carriers. The end
    of a request that is not among `request_ids` is in one of these.
    """

    replica: str
    request_ids: frozenset[str]
    sent: Mapping[int, int]


Message = Refusal | Placed | StepOutput | Finished
"""What comes over the call of a submission: a refusal alone; or that it is placed, and then either its end, or, if this
call is the carrier, the tokens and ends of all requests that this ingress has there."""


class ReplicaLost(EngineFault):
    """The engine replica is gone, or closed under the request: it may go on elsewhere, after what it has delivered."""


class CarrierLost(ReplicaLost):
    """The call that brought its tokens was ended for another's sake: neither its replica nor the request failed."""


class TokenStream(Protocol):
    """The open end of a submission."""

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> Delivery:
        """The next delivery; the last has `finished` set.

        Raises `ApiError` 400 if the engine refused the request, `ReplicaLost`, `EngineDeadError`, and `EngineFault` if
        its client does not read or no replica will come for it.
        """

    def close(self) -> None:
        """Abort unless it has ended. A plain call, good in a `finally` and idempotent."""


class EngineClient(Protocol):
    """Everything the ingress asks of the engine."""

    async def limits(self) -> EngineLimits: ...

    async def stats(self) -> list[EngineStats]:
        """One entry for each replica."""

    async def check_health(self) -> None:
        """Raise `EngineFault` if no replica can serve."""

    async def load_adapter(self, request: LoRARequest) -> str:
        """Have all replicas read an adapter; returns its digest. Raises `ApiError` if they cannot."""

    def submit(self, submission: Submission) -> TokenStream: ...
