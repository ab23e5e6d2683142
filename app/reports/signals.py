"""What an engine replica tells of itself: to the autoscaler, and to the routers in the ingress replicas."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from engine.outputs import EngineStats

DOOR_REPORT_S = 2.0
"""Seconds that an ingress replica's word of its queue is good for; it repeats it while there is one."""

_RATE_WINDOW_S = 1.0
"""Seconds of a queue that make a reading of the speed of prompts: prompts are counted when they begin, in lumps."""

_RATE_DECAY = 0.98
"""Of the best reading, at each further one: what others do on the machine may slow it for good."""

_USE_WINDOW_S = 10.0


@dataclass(frozen=True, slots=True)
class DoorReport:
    """What one ingress replica holds back: requests, their prompt tokens, and how long the first has waited."""

    ingress: str
    waiting: int
    tokens: float
    age_s: float


class Signals:
    """slots: sequences that the engine runs at once."""

    def __init__(self, slots: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._slots = slots
        self._clock = clock
        self._doors: dict[str, tuple[float, DoorReport]] = {}
        self._prefill = PrefillMeter()

    def note_door(self, report: DoorReport) -> None:
        self._doors[report.ingress] = self._clock(), report

    def autoscaling(self, stats: EngineStats) -> dict[str, float]:
        """The signals of `app.autoscaling.SIGNALS`. Called now and then; the speed of prompts is read between calls."""
        now = self._clock()
        self._prefill.read(now, stats)
        for name in [name for name, (at, _) in self._doors.items() if now - at > DOOR_REPORT_S]:
            del self._doors[name]
        doors = [report for _, report in self._doors.values()]
        return {
            "slots": self._slots,
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "waiting_tokens": stats.waiting_tokens,
            "queue_age_s": stats.queue_age_s,
            "kv_used": stats.live_blocks / stats.total_blocks,
            "prefill_used": self._prefill.used,
            "prefill_rate": self._prefill.rate,
            "door_waiting": sum(report.waiting for report in doors),
            "door_tokens": sum(report.tokens for report in doors),
            "door_age_s": max((report.age_s for report in doors), default=0.0),
        }

    def routing(self, stats: EngineStats) -> dict[str, float]:
        """What a router weighs: places, requests there, the size of the KV cache and what running ones leave of it."""
        return {
            "slots": self._slots,
            "load": stats.num_running + stats.num_waiting,
            "blocks": stats.total_blocks,
            "kv_free": 1.0 - stats.live_blocks / stats.total_blocks,
        }


class PrefillMeter:
    """rate: prompt tokens a second that the engine has computed while more of them waited, at its best.
    used: of that, how much was used lately, 0 to about 1."""

    def __init__(self) -> None:
        self.rate = 0.0
        self.used = 0.0
        self._last: tuple[float, int, bool] | None = None
        self._queued_s = 0.0
        self._queued_tokens = 0

    def read(self, now: float, stats: EngineStats) -> None:
        computed = stats.prompt_tokens - stats.cached_prompt_tokens
        waits = stats.num_waiting > 0
        last, self._last = self._last, (now, computed, waits)
        if last is None or now <= last[0]:
            return
        seconds, tokens = now - last[0], computed - last[1]
        if waits and last[2]:
            self._queued_s += seconds
            self._queued_tokens += tokens
        if self._queued_s >= _RATE_WINDOW_S:
            self.rate = max(self.rate * _RATE_DECAY, self._queued_tokens / self._queued_s)
            self._queued_s, self._queued_tokens = 0.0, 0
        if self.rate:
            share = min(1.0, seconds / _USE_WINDOW_S)
            self.used += share * (tokens / seconds / self.rate - self.used)
