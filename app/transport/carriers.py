"""Which of an ingress's calls carries the tokens of which streams, who was heard when, and what is lost with a call."""

import math
import time
from collections import defaultdict
from collections.abc import Iterable

from app.engine_client import CarrierLost, Holding, Placed, ReplicaLost
from app.transport.token_stream import ServeTokenStream, replica_lost

Key = tuple[str, int]
"""A carrier: the replica, and which of its calls."""

LEFT = "its own client left"
"""Why a carrier ends that is cancelled here; others may just have been placed on it."""


class Carriers:
    """The open streams of one ingress, by the call over which their tokens come."""

    def __init__(self) -> None:
        self._unplaced: dict[ServeTokenStream, float] = {}  # and since when
        self._heard_at: dict[str, float] = {}  # by replica
        self._placed: defaultdict[Key, set[ServeTokenStream]] = defaultdict(set)
        self._ended: dict[str, tuple[int, str]] = {}  # by replica, the last carrier that has ended, and why
        self._unheld: set[ServeTokenStream] = set()  # by the last word of their replicas

    def add(self, stream: ServeTokenStream) -> None:
        """It is on its way to a replica."""
        self._unplaced[stream] = time.monotonic()

    def hear(self, replica: str) -> None:
        self._heard_at[replica] = time.monotonic()

    def place(self, stream: ServeTokenStream, placed: Placed) -> None:
        self.hear(placed.replica)
        stream.placed = placed
        self._unplaced.pop(stream, None)
        if stream.closed:
            return
        number, why = self._ended.get(placed.replica, (0, ""))
        if number >= placed.carrier:
            stream.fail(_loss(why))
        else:
            self._placed[placed.replica, placed.carrier].add(stream)

    def remove(self, stream: ServeTokenStream) -> bool:
        """Forget a stream that is closed. Returns whether its call carries no other one."""
        placed = stream.placed
        if placed is None:
            self._unplaced.pop(stream, None)
            return True
        key = placed.replica, placed.carrier
        others = self._placed[key]
        others.discard(stream)
        # Those on their way may have been given this carrier already.
        alone = not placed.carries or not (others or self._unplaced)
        if not others:
            del self._placed[key]
        return alone

    def end(self, placed: Placed, why: str) -> None:
        """Nothing comes over a carrier any more: what has not ended, or is placed on it later, is lost. One that the
        replica ends has told all ends; one that is cancelled may end as quietly, with some untold. why: `LEFT` if it
        was cancelled here."""
        self._note_end(placed.replica, placed.carrier, why)
        for stream in list(self._placed.get((placed.replica, placed.carrier), ())):
            stream.fail(_loss(why))

    def _note_end(self, replica: str, carrier: int, why: str) -> None:
        self._ended[replica] = max((carrier, why), self._ended.get(replica, (0, "")))

    def waits_s(self) -> float:
        """How long the request under way that has heard least has heard nothing of its replica."""
        placed = {replica for replica, _ in self._placed}
        self._heard_at = {replica: at for replica, at in self._heard_at.items() if replica in placed}
        since = min([*self._heard_at.values(), *self._unplaced.values()], default=math.inf)
        return max(0.0, time.monotonic() - since)

    def lose(self, replicas: frozenset[str]) -> None:
        """Give up what these have, and what may be on its way to them."""
        lost = list(self._unplaced)
        for (replica, carrier), streams in self._placed.items():
            if replica in replicas:
                self._note_end(replica, carrier, "silent")
                lost += streams
        for stream in lost:  # which may still run there, should it go on
            stream.fail(replica_lost("silent"), ended=False)

    def check(self, holdings: Iterable[Holding]) -> bool:
        """Give up requests that their replica does not hold, as of two answers in a row: the word of their end is lost.

        Returns whether there are some as of this answer, so that it is worth to ask again. One is on its way there, or
        its end on the way here, when it is not held in a single answer.
        """
        held = {holding.replica: holding.request_ids for holding in holdings}
        unheld = {
            stream
            for (replica, _), streams in self._placed.items()
            if replica in held
            for stream in streams
            if not stream.ended and stream.request_id not in held[replica]
        }
        for stream in unheld & self._unheld:
            stream.fail(replica_lost("does not know the request"))
        self._unheld = unheld - self._unheld
        return bool(self._unheld)


def _loss(why: str) -> ReplicaLost:
    return CarrierLost(f"The call that carried its tokens has ended ({why}).") if why == LEFT else replica_lost(why)
