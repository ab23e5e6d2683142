"""How messages go from process to process: what `shm_ring` and `tcp_link` have in common."""

from collections.abc import Callable
from typing import Protocol


class ChannelTimeoutError(TimeoutError):
    """The other side did not answer in time: it is stuck, stopped or dead."""


class ChannelClosedError(ConnectionError):
    """The other side is closed: its process has ended."""


def keep_waiting() -> None:
    """The check of one who has nothing to look out for."""


class Sender(Protocol):
    def send(self, message: bytes, timeout_s: float, check: Callable[[], None] = keep_waiting) -> None:
        """Raises `ChannelTimeoutError` if the other side has no room for it in time, `ChannelClosedError`, and what
        `check` raises, which is called several times a second while this waits."""


class Receiver(Protocol):
    def receive(self, timeout_s: float, check: Callable[[], None] = keep_waiting) -> bytearray:
        """The next message. Raises `ChannelTimeoutError` if none comes, and otherwise as `Sender.send` does."""
