import os
import socket
import threading

import pytest

from engine.remote.channel import ChannelClosedError, ChannelTimeoutError
from engine.remote.tcp_link import Door, TcpLink

KEY = bytes(range(32))


@pytest.fixture
def door() -> Door:
    return Door("127.0.0.1", KEY)


def pair(door: Door) -> tuple[TcpLink, TcpLink]:
    there = TcpLink.connect(door.address, KEY, 5.0)
    here = door.accept(5.0)
    assert here is not None
    return here, there


def test_messages_come_whole_and_in_order(door: Door) -> None:
    here, there = pair(door)
    messages = [b"", b"a", os.urandom(100), os.urandom(3_000_000), b"z"] * 3
    sender = threading.Thread(target=lambda: [here.send(message, 20.0) for message in messages])
    sender.start()
    assert [bytes(there.receive(20.0)) for _ in messages] == messages
    sender.join()


def test_both_ways_at_once(door: Door) -> None:
    here, there = pair(door)
    for i in range(200):
        here.send(bytes([i]), 5.0)
        there.send(bytes([i, i]), 5.0)
        assert there.receive(5.0) == bytes([i])
        assert here.receive(5.0) == bytes([i, i])


def test_silence_is_a_timeout(door: Door) -> None:
    here, _there = pair(door)
    with pytest.raises(ChannelTimeoutError, match=r"no message came for 0\.05 s"):
        here.receive(0.05)


def test_who_reads_nothing_is_a_timeout(door: Door) -> None:
    here, _there = pair(door)
    with pytest.raises(ChannelTimeoutError, match="took no message"):
        here.send(bytes(50_000_000), 0.1)


def test_who_waits_is_told_that_it_is_in_vain(door: Door) -> None:
    here, _there = pair(door)
    with pytest.raises(ZeroDivisionError):
        here.receive(20.0, lambda: 1 // 0)


def test_an_end_that_goes_is_seen_at_once(door: Door) -> None:
    here, there = pair(door)
    there.close()
    with pytest.raises(ChannelClosedError):
        here.receive(20.0)


def test_without_the_key_nobody_comes_in(door: Door) -> None:
    for greeting in (bytes(32), b"GET / HTTP/1.1\r\n\r\n"):
        with socket.create_connection(door.address) as stranger:
            stranger.sendall(greeting)
            stranger.shutdown(socket.SHUT_WR)
            assert door.accept(5.0) is None
    pair(door)


def test_nobody_at_the_door(door: Door) -> None:
    assert door.accept(0.01) is None
