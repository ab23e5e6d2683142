"""How fast the places of a queue's engine become free, for those who are told when to come again.

What ends while little is asked says nothing of how much could: so only times count in which all places were taken.
Standard library only.
"""

from collections import deque

_WINDOW = 64
"""Releases that the estimate looks back on."""


class Pace:
    """Times are seconds on one clock."""

    def __init__(self) -> None:
        self._is_full = False
        self._since = 0.0
        self._full_s = 0.0  # until then, in all
        self._released_at: deque[float] = deque(maxlen=_WINDOW)  # by the time that it has been full
        self._took_s: deque[float] = deque(maxlen=_WINDOW)  # from grant to release

    def note_full(self, now: float, is_full: bool) -> None:
        """Whether, from now on, all places are taken."""
        if is_full is not self._is_full:
            self._full_s = self._full_until(now)
            self._is_full, self._since = is_full, now

    def note_release(self, now: float, granted_at: float) -> None:
        """A place that was given to somebody then is free."""
        self._took_s.append(now - granted_at)
        if self._is_full:
            self._released_at.append(self._full_until(now))

    def interval_s(self, now: float) -> float | None:
        """Seconds between two releases when all places are taken; None while that is not known."""
        if len(self._released_at) < 2:
            return None
        # Up to now, not up to the last release: when nothing is released any more, the pace falls.
        return (self._full_until(now) - self._released_at[0]) / len(self._released_at)

    def took_s(self) -> float | None:
        """Mean seconds that somebody has had a place; None while nobody has left one."""
        return sum(self._took_s) / len(self._took_s) if self._took_s else None

    def _full_until(self, now: float) -> float:
        return self._full_s + (now - self._since if self._is_full else 0.0)
