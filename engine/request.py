"""One request's state outside the running batch."""

from collections.abc import Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engine.bad_words import BadSequences
from engine.block_hash import chain, root_hash
from engine.outputs import TokenLogprobs
from engine.sampling_params import SamplingParams
from engine.structured.grammar import Matcher

if TYPE_CHECKING:
    from engine.lora.adapter import Adapter


class Status(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Request:
    """What the scheduler knows of a request.

    token_ids: prompt and output while the request waits; while it runs, its row of the batch holds them.
    tenant: whose request it is; tenants share the engine fairly.
    is_batch: whether it only uses what nobody else wants.
    rank, arrival: its place in the order of service among its tenant's, lower is earlier; the last of all by rank is
        the first to be preempted. waits_since: when it last began to wait, by the queue's clock.
    limit: tokens (prompt and output) at which it ends by length.
    stop_ids: token ids that end it.
    prompt_logprobs: the prompt's log probabilities as far as they have come; None when none are to come.
    bad_sequences: what it may not say.
    needs_last_token: whether what it may choose next depends on the token before, so that it is never planned for ahead
        of one that is not known yet.
    matcher: where its output stands in the grammar it must follow, by all tokens that are known; None without one.
    has_extras: whether it needs anything of `ExtraRows`.
    adapter: what is added to the model for it, or None.
    hashes: digests of its full blocks as far as they have been computed.
    blocks: the KV blocks it holds, in order.
    num_charged: while it runs, how many of its tokens its tenant has been charged for.
    host_blocks: while it waits, host blocks that hold the KV of its first num_on_host tokens; else none.
    """

    __slots__ = (
        "adapter",
        "arrival",
        "bad_sequences",
        "blocks",
        "has_extras",
        "hashes",
        "host_blocks",
        "is_batch",
        "limit",
        "matcher",
        "needs_last_token",
        "num_cached_tokens",
        "num_charged",
        "num_on_host",
        "num_prompt",
        "params",
        "priority",
        "prompt_logprobs",
        "rank",
        "request_id",
        "row",
        "salt",
        "seed",
        "status",
        "stop_ids",
        "tenant",
        "token_ids",
        "waits_since",
    )

    def __init__(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        params: SamplingParams,
        *,
        seed: int,
        limit: int,
        stop_ids: tuple[int, ...],
        priority: int = 0,
        tenant: str = "",
        is_batch: bool = False,
        salt: str | None = None,
        hashes: list[bytes] | None = None,
        matcher: Matcher | None = None,
        adapter: "Adapter | None" = None,
    ) -> None:
        self.request_id = request_id
        self.token_ids: NDArray[np.int32] = np.array([*prompt_ids, *output_ids], dtype=np.int32)
        self.num_prompt = len(prompt_ids)
        self.params = params
        self.seed = seed
        self.limit = limit
        self.stop_ids = stop_ids
        self.priority = priority
        self.tenant = tenant
        self.is_batch = is_batch
        self.salt = salt
        self.adapter = adapter
        self.arrival = 0
        self.rank = 0.0
        self.waits_since = 0.0
        self.row = -1
        self.status = Status.WAITING
        self.blocks: list[int] = []
        self.host_blocks: list[int] = []
        self.num_on_host = 0
        self.num_cached_tokens: int | None = None
        self.num_charged = 0
        self.hashes = list(hashes or ())
        self.bad_sequences = BadSequences(params.bad_words_token_ids)
        self.matcher = matcher
        self.needs_last_token = bool(self.bad_sequences) or matcher is not None
        # With output it was there before, and its prompt's came with the first token.
        scored = params.prompt_logprobs is not None and not output_ids
        self.prompt_logprobs: list[TokenLogprobs | None] | None = [None] if scored else None
        self.has_extras = (
            scored
            or self.needs_last_token
            or params.penalised
            or params.logprobs is not None
            or params.allowed_token_ids is not None
            or bool(params.logit_bias or params.bad_words_token_ids)
        )

    def forget_scores(self) -> None:
        """The prompt is to be computed again, from its first token."""
        if self.prompt_logprobs is not None:
            self.prompt_logprobs = [None]

    def extend_hashes(self, token_ids: NDArray[np.int32], block_size: int, num_blocks: int) -> None:
        """Add the digests that its first `num_blocks` blocks lack (the prompt's may have come along).

        token_ids: the request's, and perhaps more behind them.
        """
        start = len(self.hashes)
        if start < num_blocks:
            data = token_ids[start * block_size : num_blocks * block_size]
            parent = self.hashes[-1] if start else self._root_hash()
            self.hashes += chain(data.astype("<i4", copy=False).tobytes(), block_size, parent)

    def _root_hash(self) -> bytes:
        return root_hash(self.salt, "" if self.adapter is None else self.adapter.digest)
