"""Messages from one process to several others on the same machine, through a ring in shared memory.

The writer numbers its messages; each reader acknowledges what it has taken, and a message's place is used again once
all have. Who waits sleeps on a futex (Franke, Russell and Kirkwood, 2002): to look again and again for a while before
that takes the core that the other side needs.
"""

import ctypes
import mmap
import platform
import struct
import time
import zlib
from collections.abc import Callable
from typing import Self

import numpy as np

from engine.remote.channel import ChannelTimeoutError, keep_waiting
from engine.remote.host_memory import HostMemory

SLOTS = 16
SLOT_BYTES = 64 << 10
"""A message takes as many slots as it needs, one after another as they come free."""

_SLEEP_S = 0.1  # between two looks whether waiting still makes sense
_LINE = 64  # bytes of a cache line: what different processes write lies in different lines
_FUTEX = ctypes.c_long({"x86_64": 202, "aarch64": 98}[platform.machine()])  # its system call
_WAIT, _WAKE = 0, 1
_HEADER = struct.Struct("<QIBxxxI")  # number, length, whether the message ends here, checksum
_libc = ctypes.CDLL(None)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Counter:
    """A number in shared memory that one process raises and others wait for. Aligned, so no reader sees half of it."""

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self._value = np.frombuffer(memory, dtype=np.uint32, count=1, offset=offset)
        self._address = ctypes.c_void_p(self._value.ctypes.data)

    def __int__(self) -> int:
        return int(self._value[0])

    def raise_to(self, value: int) -> None:
        self._value[0] = value & 0xFFFFFFFF
        _libc.syscall(_FUTEX, self._address, _WAKE, 0x7FFFFFFF, None, None, 0)

    def wait_past(self, seen: int, deadline: float, check: Callable[[], None]) -> None:
        """Return once the number is another than `seen`. Raises `ChannelTimeoutError` at the deadline (monotonic), and
        what `check` raises, unless the number has changed by then: what came before the end counts."""
        while self._value[0] == seen:
            try:
                check()
            except Exception:
                if self._value[0] != seen:
                    return
                raise
            left = deadline - time.monotonic()
            if left <= 0:
                raise ChannelTimeoutError
            timeout = _Timespec(0, int(min(left, _SLEEP_S) * 1e9))
            _libc.syscall(_FUTEX, self._address, _WAIT, seen, ctypes.byref(timeout), None, 0)


class Ring:
    """The memory: the writer's counter, one for each reader, then slots of a header and SLOT_BYTES.

    Made by one process, for one writer and a fixed number of readers; `address` opens it in others on this machine
    for as long as the maker lives and has not closed it.
    """

    def __init__(self, memory: HostMemory, num_readers: int) -> None:
        self.num_readers = num_readers
        self._shared = memory
        self._memory = memory.mapped
        self.sent = _Counter(self._memory, 0)
        self._given_up = np.frombuffer(self._memory, dtype=np.uint32, count=1, offset=4)
        self.taken = [_Counter(self._memory, (1 + i) * _LINE) for i in range(num_readers)]
        self._slots = (1 + num_readers) * _LINE

    @classmethod
    def create(cls, num_readers: int) -> Self:
        return cls(HostMemory.create(_size(num_readers)), num_readers)

    @classmethod
    def open(cls, address: str) -> Self:
        """Raises `OSError` if its maker is gone or runs on another machine."""
        memory, _, num_readers = address.rpartition(":")
        return cls(HostMemory.open(memory, _size(int(num_readers))), int(num_readers))

    @property
    def pid(self) -> int:
        """Of the process that made it."""
        return self._shared.maker

    @property
    def address(self) -> str:
        return f"{self._shared.address}:{self.num_readers}"

    def give_up(self) -> None:
        """By the writer: readers are to make nothing of what is in it."""
        self._given_up[0] = 1

    @property
    def given_up(self) -> bool:
        return bool(self._given_up[0])

    def close(self) -> None:
        """Let nobody else open it; idempotent. Who holds the memory keeps it."""
        self._shared.close()

    def fill(self, number: int, part: memoryview, last: bool) -> None:
        at = self._at(number)
        self._memory[at + _LINE : at + _LINE + len(part)] = part
        _HEADER.pack_into(self._memory, at, number, len(part), last, zlib.crc32(part))

    def take(self, number: int, deadline: float) -> tuple[bytes, bool]:
        """A processor may show a reader the counter before the message: it looks again until the sum is right."""
        at = self._at(number)
        while True:
            found, length, last, checksum = _HEADER.unpack_from(self._memory, at)
            if found == number and length <= SLOT_BYTES:
                part = self._memory[at + _LINE : at + _LINE + length]
                if zlib.crc32(part) == checksum:
                    return part, last
            if time.monotonic() > deadline:
                raise ChannelTimeoutError(f"message {number} did not arrive whole")

    def _at(self, number: int) -> int:
        return self._slots + number % SLOTS * (_LINE + SLOT_BYTES)


class RingWriter:
    """Sends to all readers of a ring."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._sent = 0
        self._free = SLOTS  # slots known to be free

    def send(self, message: bytes, timeout_s: float, check: Callable[[], None] = keep_waiting) -> None:
        """See `engine.remote.channel.Sender`; waits for the slowest reader only when the ring is full."""
        body = memoryview(message)
        for start in range(0, max(len(body), 1), SLOT_BYTES):
            if not self._free:
                self._wait_for_room(timeout_s, check)
            part = body[start : start + SLOT_BYTES]
            self._ring.fill(self._sent, part, last=start + SLOT_BYTES >= len(body))
            self._sent += 1
            self._free -= 1
            self._ring.sent.raise_to(self._sent)

    def _wait_for_room(self, timeout_s: float, check: Callable[[], None]) -> None:
        deadline = time.monotonic() + timeout_s
        for taken in self._ring.taken:
            while self._behind(taken) >= SLOTS:
                try:
                    taken.wait_past(self._sent - SLOTS & 0xFFFFFFFF, deadline, check)
                except ChannelTimeoutError:
                    late = [str(i) for i, t in enumerate(self._ring.taken) if self._behind(t) >= SLOTS]
                    names = ", ".join(late)
                    raise ChannelTimeoutError(f"reader {names} took no message for {timeout_s:g} s") from None
        self._free = SLOTS - max(map(self._behind, self._ring.taken))

    def _behind(self, taken: _Counter) -> int:
        return self._sent - int(taken) & 0xFFFFFFFF


class RingReader:
    """Receives, in order, all that is sent through a ring. reader: its number, from 0; each is used by one process."""

    def __init__(self, ring: Ring, reader: int) -> None:
        self._ring = ring
        self._counter = ring.taken[reader]
        self._next = 0

    def receive(self, timeout_s: float, check: Callable[[], None] = keep_waiting) -> bytearray:
        """See `engine.remote.channel.Receiver`."""
        deadline = time.monotonic() + timeout_s
        body = bytearray()
        last = False
        while not last:
            try:
                self._ring.sent.wait_past(self._next & 0xFFFFFFFF, deadline, check)
            except ChannelTimeoutError:
                raise ChannelTimeoutError(f"no message came for {timeout_s:g} s") from None
            part, last = self._ring.take(self._next, deadline)
            body += part
            self._next += 1
            self._counter.raise_to(self._next)
        return body


def _size(num_readers: int) -> int:
    return (1 + num_readers) * _LINE + SLOTS * (_LINE + SLOT_BYTES)
