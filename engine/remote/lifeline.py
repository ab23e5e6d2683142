"""Whether the processes of a group live. Each keeps a connection to the one that leads them: it says over it that it is
there, and ends when the connection does.

A process that is killed is seen at once, since the system closes its connections; one that is stopped, or whose machine
is gone, by its silence.
"""

import os
import select
import threading
import time
from collections.abc import Mapping

from engine.remote.channel import ChannelClosedError, ChannelTimeoutError
from engine.remote.tcp_link import TcpLink

BEATS = 4
"""So often within the time after which silence counts as death."""


class Lifelines:
    """The leader's ends. links: by the rank of the process at the other end."""

    def __init__(self, links: Mapping[int, TcpLink]) -> None:
        self._links = dict(links)
        self._poll = select.poll()
        self._rank_of: dict[int, int] = {}
        for rank, link in self._links.items():
            self._poll.register(link, select.POLLIN)
            self._rank_of[link.fileno()] = rank
        self._heard = dict.fromkeys(self._links, time.monotonic())

    def find_lost(self, wait_s: float, silence_s: float) -> str | None:
        """Listen for up to so many seconds; which rank is lost and how it is known, or None.

        silence_s: after which a rank counts as lost.
        """
        events = self._poll.poll(wait_s * 1000)
        now = time.monotonic()  # if this process was stopped, what has come meanwhile counts as heard now
        for descriptor, _ in events:
            rank = self._rank_of[descriptor]
            try:
                self._links[rank].discard()
            except ChannelClosedError:
                return f"the process of shard {rank} has ended"
            self._heard[rank] = now
        for rank, heard in self._heard.items():
            if now - heard > silence_s:
                return f"shard {rank} has said nothing for {now - heard:.1f} s"
        return None


def hold(link: TcpLink, silence_s: float) -> None:
    """Keep this process's end in a thread of its own, which ends the process when the leader's is gone."""
    threading.Thread(target=_hold, args=(link, silence_s), name="lifeline", daemon=True).start()


def _hold(link: TcpLink, silence_s: float) -> None:
    while True:
        try:
            link.send(b"", silence_s)
            link.receive(silence_s / BEATS)
        except ChannelTimeoutError:
            continue
        except ChannelClosedError:
            os._exit(1)  # in the midst of a step, or of a collective that will never end
