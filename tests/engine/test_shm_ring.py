"""The ring in shared memory, between real processes."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest

from engine.remote import shm_ring
from engine.remote.channel import ChannelTimeoutError
from engine.remote.shm_ring import Ring, RingReader, RingWriter

spawn = multiprocessing.get_context("spawn")


def echo(there: str, reader: int, back: str) -> None:
    ring, answers = RingReader(Ring.open(there), reader), RingWriter(Ring.open(back))
    while message := ring.receive(20.0):
        answers.send(bytes(message), 20.0)


class Echoes:
    """Processes that send back what they get; they end with an empty message."""

    def __init__(self, count: int) -> None:
        plans = Ring.create(count)
        answers = [Ring.create(1) for _ in range(count)]
        self.writer = RingWriter(plans)
        self.readers = [RingReader(ring, 0) for ring in answers]
        self.processes = [
            spawn.Process(target=echo, args=(plans.address, i, ring.address), daemon=True)
            for i, ring in enumerate(answers)
        ]
        for process in self.processes:
            process.start()

    def end(self) -> None:
        self.writer.send(b"", 20.0)
        for process in self.processes:
            process.join(20)
            assert process.exitcode == 0


def test_every_reader_gets_every_message_whole_and_in_order() -> None:
    echoes = Echoes(2)
    rng = np.random.default_rng(0)
    slot = shm_ring.SLOT_BYTES
    sizes = [1, 100, slot - 1, slot, slot + 1, 2 * slot, 5 * slot + 3, 7] * 12
    for size in sizes:  # many more than there are slots
        message = rng.bytes(size)
        echoes.writer.send(message, 20.0)
        for reader in echoes.readers:
            assert reader.receive(20.0) == message
    echoes.end()


def test_a_message_larger_than_the_ring_passes_through_it() -> None:
    echoes = Echoes(1)
    message = os.urandom(3 * shm_ring.SLOTS * shm_ring.SLOT_BYTES)
    echoes.writer.send(message, 20.0)
    assert echoes.readers[0].receive(20.0) == message
    echoes.end()


def here() -> tuple[RingWriter, RingReader, Ring]:
    ring = Ring.create(1)
    return RingWriter(ring), RingReader(ring, 0), ring


def test_counters_run_over() -> None:
    writer, reader, ring = here()
    writer._sent = reader._next = 2**32 - 5
    ring.sent.raise_to(2**32 - 5)
    ring.taken[0].raise_to(2**32 - 5)
    for i in range(3 * shm_ring.SLOTS):
        writer.send(bytes([i]), 5.0)
        assert reader.receive(5.0) == bytes([i])


def test_nothing_sent_is_a_timeout() -> None:
    _, reader, _ = here()
    with pytest.raises(ChannelTimeoutError, match=r"no message came for 0\.05 s"):
        reader.receive(0.05)


def test_who_waits_is_told_that_it_is_in_vain() -> None:
    _, reader, _ = here()
    with pytest.raises(ZeroDivisionError):
        reader.receive(20.0, lambda: 1 // 0)


def test_what_was_sent_right_before_the_end_is_received() -> None:
    writer, reader, _ = here()

    def end() -> None:
        writer.send(b"last", 1.0)
        raise ConnectionError("gone")

    assert reader.receive(5.0, end) == b"last"


def test_a_reader_that_takes_nothing_is_named() -> None:
    ring = Ring.create(3)
    writer = RingWriter(ring)
    quick = [RingReader(ring, i) for i in (0, 2)]
    for _ in range(shm_ring.SLOTS):
        writer.send(b"a plan", 1.0)
        for reader in quick:
            assert reader.receive(1.0) == b"a plan"
    with pytest.raises(ChannelTimeoutError, match=r"reader 1 took no message for 0\.05 s"):
        writer.send(b"one too many", 0.05)


def test_a_stopped_reader_goes_on_where_it_was() -> None:
    echoes = Echoes(1)
    echoes.writer.send(b"before", 20.0)
    assert echoes.readers[0].receive(20.0) == b"before"
    os.kill(echoes.processes[0].pid, signal.SIGSTOP)
    echoes.writer.send(b"while stopped", 20.0)
    with pytest.raises(ChannelTimeoutError):
        echoes.readers[0].receive(0.2)
    os.kill(echoes.processes[0].pid, signal.SIGCONT)
    assert echoes.readers[0].receive(20.0) == b"while stopped"
    echoes.end()


def test_a_killed_maker_leaves_no_memory_behind_and_no_way_in() -> None:
    code = """
import time
from engine.remote.shm_ring import Ring
ring = Ring.create(1)
print(ring.address, flush=True)
time.sleep(60)
"""
    before = set(os.listdir("/dev/shm"))
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    reader = RingReader(Ring.open(address), 0)
    process.send_signal(signal.SIGKILL)
    process.wait()
    with pytest.raises(OSError, match="No such file"):
        Ring.open(address)
    with pytest.raises(ChannelTimeoutError):
        reader.receive(0.05)
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "nanoserve" in name]


def test_a_closed_ring_keeps_those_who_hold_it_and_lets_nobody_in() -> None:
    writer, reader, ring = here()
    address = ring.address
    ring.close()
    ring.close()
    writer.send(b"still", 1.0)
    assert reader.receive(1.0) == b"still"
    with pytest.raises(OSError, match="No such file"):
        Ring.open(address)


def test_a_waiting_reader_sleeps() -> None:
    _, reader, _ = here()
    busy = time.thread_time()
    with pytest.raises(ChannelTimeoutError):
        reader.receive(0.5)
    assert time.thread_time() - busy < 0.25


def test_rings_do_not_meet() -> None:
    one, two = here(), here()
    assert one[2].address != two[2].address
    one[0].send(b"one", 1.0)
    two[0].send(b"two", 1.0)
    found: list[Any] = [two[1].receive(1.0), one[1].receive(1.0)]
    assert found == [b"two", b"one"]
