"""Messages between two processes that may be on different machines: a TCP connection, each message after its length."""

import contextlib
import hmac
import select
import socket
import struct
import time
from collections.abc import Callable

from engine.remote.channel import ChannelClosedError, ChannelTimeoutError, keep_waiting

_LENGTH = struct.Struct("<Q")
_LOOK_S = 0.1  # between two looks whether waiting still makes sense
_KEY_BYTES = 32
_GREETING_S = 5.0


class TcpLink:
    """One end of a connection. Sends and receives may be in two threads, but not more."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)
        self._socket = connection
        self._read = bytearray()

    @classmethod
    def connect(cls, address: tuple[str, int], key: bytes, timeout_s: float) -> "TcpLink":
        """To a `Door` with the same key. Raises `OSError`."""
        connection = socket.create_connection(address, timeout_s)
        connection.sendall(key)
        return cls(connection)

    def fileno(self) -> int:
        return self._socket.fileno()

    def discard(self) -> None:
        """Throw away what has come. Raises `ChannelClosedError`."""
        try:
            while part := self._socket.recv(1 << 16):
                pass
        except BlockingIOError:
            return
        except OSError as error:
            raise ChannelClosedError(f"the connection is closed: {error}") from error
        assert not part
        raise ChannelClosedError("the other end has closed the connection")

    def send(self, message: bytes, timeout_s: float, check: Callable[[], None] = keep_waiting) -> None:
        """See `engine.remote.channel.Sender`."""
        deadline = time.monotonic() + timeout_s
        left = memoryview(_LENGTH.pack(len(message)) + message)
        while left:
            try:
                left = left[self._socket.send(left) :]
            except BlockingIOError:
                self._wait(select.POLLOUT, deadline, f"the other end took no message for {timeout_s:g} s", check)
            except OSError as error:
                raise ChannelClosedError(f"the connection is closed: {error}") from error

    def receive(self, timeout_s: float, check: Callable[[], None] = keep_waiting) -> bytearray:
        """See `engine.remote.channel.Receiver`."""
        deadline = time.monotonic() + timeout_s
        size = _LENGTH.size
        while True:
            if len(self._read) >= size:
                end = size + _LENGTH.unpack_from(self._read)[0]
                if len(self._read) >= end:
                    message, self._read = self._read[size:end], self._read[end:]
                    return message
            try:
                part = self._socket.recv(1 << 20)
            except BlockingIOError:
                self._wait(select.POLLIN, deadline, f"no message came for {timeout_s:g} s", check)
                continue
            except OSError as error:
                raise ChannelClosedError(f"the connection is closed: {error}") from error
            if not part:
                raise ChannelClosedError("the other end has closed the connection")
            self._read += part

    def _wait(self, event: int, deadline: float, late: str, check: Callable[[], None]) -> None:
        poll = select.poll()
        poll.register(self._socket, event)
        while True:
            if poll.poll(_LOOK_S * 1000):
                return
            check()
            if time.monotonic() >= deadline:
                raise ChannelTimeoutError(late)

    def close(self) -> None:
        self._socket.close()


class Door:
    """Takes connections from who has its key. host: the address that others reach this machine by."""

    def __init__(self, host: str, key: bytes) -> None:
        assert len(key) == _KEY_BYTES
        self._key = key
        self._socket = socket.create_server((host, 0), family=_family(host))
        self.address: tuple[str, int] = self._socket.getsockname()[:2]

    def accept(self, timeout_s: float) -> TcpLink | None:
        """The next connection with the right key; None if there is none within the time."""
        self._socket.settimeout(timeout_s)
        try:
            connection, _ = self._socket.accept()
        except TimeoutError:
            return None
        connection.settimeout(_GREETING_S)
        with contextlib.suppress(OSError):
            if hmac.compare_digest(connection.recv(_KEY_BYTES, socket.MSG_WAITALL), self._key):
                return TcpLink(connection)
        connection.close()
        return None

    def close(self) -> None:
        self._socket.close()


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
