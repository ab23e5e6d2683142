"""What an ingress counts of its requests: how they ended and how long things took. It adds up over ingresses."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
REQUEST_S = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0)
"""Upper bounds of histogram buckets; most of them are vLLM's, so that its dashboards fit."""


@dataclass(slots=True)
class Histogram:
    """bounds: upper ones, rising. counts: one for each, and one for what is above all."""

    bounds: Sequence[float]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def add(self, other: "Histogram") -> None:
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.total += other.total


@dataclass(slots=True)
class RequestStats:
    """Of engine requests, one for each choice.

    finished: by finish reason. first_token_s: from the request's arrival. token_s: mean time between tokens of a
    request, of those with two or more. request_s: the whole. queue_s: before it was given to the engine.
    """

    finished: Counter[str] = field(default_factory=Counter)
    first_token_s: Histogram = field(default_factory=lambda: Histogram(TTFT_S))
    token_s: Histogram = field(default_factory=lambda: Histogram(TOKEN_S))
    request_s: Histogram = field(default_factory=lambda: Histogram(REQUEST_S))
    queue_s: Histogram = field(default_factory=lambda: Histogram(REQUEST_S))

    def end(self, reason: str, num_tokens: int, arrived: float, first: float, now: float) -> None:
        """A request has ended: times by one clock."""
        self.finished[reason] += 1
        self.request_s.observe(now - arrived)
        if num_tokens > 1:
            self.token_s.observe((now - first) / (num_tokens - 1))

    def add(self, other: "RequestStats") -> None:
        self.finished += other.finished
        self.first_token_s.add(other.first_token_s)
        self.token_s.add(other.token_s)
        self.request_s.add(other.request_s)
        self.queue_s.add(other.queue_s)


@dataclass(frozen=True, slots=True)
class IngressStats:
    """One ingress, as it tells the others. outstanding, queued: its requests in the engine, and before it.

    resubmitted, given_up, longest_pause_s: as in `app.failover.FailoverCounts`.
    queued_tokens, capacity, refused: as in `app.admission.Admission`.
    prompt_blocks, hit_blocks, routed: as in `app.reports.pool.Pool`.
    """

    outstanding: int
    queued: int
    requests: RequestStats
    resubmitted: int = 0
    given_up: int = 0
    longest_pause_s: float = 0.0
    queued_tokens: int = 0
    capacity: int = 0
    refused: int = 0
    prompt_blocks: int = 0
    hit_blocks: int = 0
    routed: Mapping[str, int] = field(default_factory=dict)
