"""Which of an ingress's calls carries the tokens of which streams, who was heard when, and what is lost with a call."""

import math
import time
from collections import defaultdict
from collections.abc import Iterable

from app.engine_client import CarrierLost, Holding, Placed, ReplicaLost
from app.transport.token_stream import ServeTokenStream, engine_gone, replica_lost

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
        self._read: defaultdict[Key, int] = defaultdict(int)  # messages
        # By the last word of their replicas, and how many messages of their carriers must bring the end.
        self._unheld: dict[ServeTokenStream, int] = {}

    def add(self, stream: ServeTokenStream) -> None:
        """It is on its way to a replica."""
        self._unplaced[stream] = time.monotonic()

    @property
    def has_unplaced(self) -> bool:
        """Whether requests are on their way, or wait for a replica."""
        return bool(self._unplaced)

    def read(self, placed: Placed) -> None:
        """What a message of a carrier brought has been delivered."""
        self._heard_at[placed.replica] = time.monotonic()
        self._read[placed.replica, placed.carrier] += 1

    def place(self, stream: ServeTokenStream, placed: Placed) -> None:
        self._heard_at[placed.replica] = time.monotonic()
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
        key = placed.replica, placed.carrier
        self._read.pop(key, None)
        for stream in list(self._placed.get(key, ())):
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

    def give_up(self) -> None:
        """End what waits for a replica: none will come."""
        for stream in list(self._unplaced):  # its call is still open
            stream.fail(engine_gone(), ended=False)

    def placed(self) -> frozenset[ServeTokenStream]:
        """The streams that are at a replica."""
        return frozenset().union(*self._placed.values())

    def check(self, holdings: Iterable[Holding], asked_of: frozenset[ServeTokenStream]) -> bool:
        """Give up requests that their replica does not hold, when all that it had sent by then has been read and did
        not bring their end: the word of that is lost.

        asked_of: those that were placed when the question was sent; an answer may be old, and knows no later ones.
        Returns whether there are some whose end may still be on its way, so that it is worth to ask again: this side
        can be seconds behind. A carrier that its replica has closed brings the rest; it has when nothing comes between
        two answers.
        """
        unheld: dict[ServeTokenStream, int] = {}
        for holding in holdings:
            for key, streams in self._placed.items():
                if key[0] != holding.replica:
                    continue
                read, sent = self._read.get(key, 0), holding.sent.get(key[1])
                for stream in streams & asked_of:
                    if stream.ended or stream.request_id in holding.request_ids:
                        continue
                    must_read = self._unheld.get(stream)
                    if must_read is None or (sent is None and read > must_read):
                        unheld[stream] = read if sent is None else sent
                    elif read < must_read:
                        unheld[stream] = must_read
                    else:
                        stream.fail(replica_lost("does not know the request"))
        self._unheld = unheld
        return bool(unheld)


def _loss(why: str) -> ReplicaLost:
    return CarrierLost(f"The call that carried its tokens has ended ({why}).") if why == LEFT else replica_lost(why)
