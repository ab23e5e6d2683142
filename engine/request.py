"""One request's state outside the running batch."""

from collections.abc import Sequence
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

from engine.block_hash import chain, root_hash
from engine.sampling_params import SamplingParams


class Status(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Request:
    """What the scheduler knows of a request.

    token_ids: prompt and output while the request waits; while it runs, its row of the batch holds them.
    rank, arrival: its place in the order of service, lower is earlier.
    limit: tokens (prompt and output) at which it ends by length.
    stop_ids: token ids that end it.
    hashes: digests of its full blocks as far as they have been computed.
    blocks: the KV blocks it holds, in order.
    """

    __slots__ = (
        "arrival",
        "blocks",
        "hashes",
        "limit",
        "num_cached_tokens",
        "num_prompt",
        "params",
        "priority",
        "rank",
        "request_id",
        "row",
        "salt",
        "seed",
        "status",
        "stop_ids",
        "token_ids",
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
        salt: str | None = None,
        hashes: list[bytes] | None = None,
    ) -> None:
        self.request_id = request_id
        self.token_ids: NDArray[np.int32] = np.array([*prompt_ids, *output_ids], dtype=np.int32)
        self.num_prompt = len(prompt_ids)
        self.params = params
        self.seed = seed
        self.limit = limit
        self.stop_ids = stop_ids
        self.priority = priority
        self.salt = salt
        self.arrival = 0
        self.rank = 0.0
        self.row = -1
        self.status = Status.WAITING
        self.blocks: list[int] = []
        self.num_cached_tokens: int | None = None
        self.hashes = list(hashes or ())

    def extend_hashes(self, token_ids: NDArray[np.int32], block_size: int) -> None:
        """Add the digests of the full blocks of `token_ids` that have none yet (the prompt's may have come along)."""
        start = len(self.hashes) * block_size
        if len(token_ids) - start >= block_size:
            parent = self.hashes[-1] if self.hashes else root_hash(self.salt)
            self.hashes += chain(token_ids[start:].astype("<i4", copy=False).tobytes(), block_size, parent)
