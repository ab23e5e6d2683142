"""An engine over ranks behind rings and connections, here in threads."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from engine.engine import Engine
from engine.errors import EngineDeadError
from engine.remote.channel import Receiver, Sender
from engine.remote.lifeline import Lifelines
from engine.remote.runner import RemoteRunner, serve_rank
from engine.remote.shm_ring import Ring, RingReader, RingWriter
from engine.remote.tcp_link import Door, TcpLink
from engine.sampling_params import SamplingParams
from tests.scripted import LateRunner, ShadowRunner, drain, runner_info, shadow_continuation

GREEDY = SamplingParams(max_tokens=25, temperature=0, ignore_eos=True)


class Nowhere:
    def send(self, message: bytes, timeout_s: float, check: object = None) -> None:
        pass


@contextmanager
def ranks(near: int, far: int, timeout_s: float = 20.0) -> Iterator[RemoteRunner]:
    """The first rank is a near one, if there is any."""
    ring, answers, door = Ring.create(near), Ring.create(1), Door("127.0.0.1", bytes(32))
    plans: list[Sender] = [RingWriter(ring)] if near else []
    ends: list[tuple[Receiver, Sender]] = [(RingReader(ring, i), Nowhere()) for i in range(near)]
    links = [(TcpLink.connect(door.address, bytes(32), 5.0), door.accept(5.0)) for _ in range(far)]
    for theirs, ours in links:
        assert ours is not None
        plans.append(ours)
        ends.append((theirs, theirs if not near and len(ends) == 0 else Nowhere()))
    results: Receiver = RingReader(answers, 0)
    if near:
        ends[0] = ends[0][0], RingWriter(answers)
    else:
        assert links[0][1] is not None
        results = links[0][1]
    runner = RemoteRunner(runner_info(), plans, results, timeout_s)
    threads = [
        threading.Thread(target=serve_rank, args=(LateRunner(ShadowRunner()), *end), daemon=True) for end in ends
    ]
    for thread in threads:
        thread.start()
    yield runner
    runner.close()
    for thread in threads:
        thread.join(5.0)
        assert not thread.is_alive()


@pytest.mark.parametrize(("near", "far"), [(2, 0), (1, 1), (0, 2)])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_tokens_are_those_of_a_runner_in_the_process(near: int, far: int, asynchronous: bool) -> None:
    with ranks(near, far) as runner:
        engine = Engine(runner, async_scheduling=asynchronous)
        prompts = {f"r{i}": list(range(3 + i, 20 + 3 * i)) for i in range(4)}
        for name, prompt in prompts.items():
            engine.add_request(name, prompt, GREEDY)
        assert drain(engine) == {name: shadow_continuation(prompt, 25, 384) for name, prompt in prompts.items()}


def test_a_lost_group_is_an_engine_that_is_dead() -> None:
    runner = RemoteRunner(runner_info(), [RingWriter(Ring.create(1))], RingReader(Ring.create(1), 0), 20.0)
    engine = Engine(runner)
    engine.add_request("a", [5], GREEDY)
    threading.Timer(0.1, runner.lose, ("shard 1 fell down",)).start()
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="shard 1 fell down"):
            engine.step()
    engine.close()


def test_ranks_that_do_not_answer_are_lost() -> None:
    runner = RemoteRunner(runner_info(), [RingWriter(Ring.create(1))], RingReader(Ring.create(1), 0), 0.05)
    engine = Engine(runner)
    engine.add_request("a", [5], GREEDY)
    with pytest.raises(EngineDeadError, match=r"a step brought no result: no message came for 0\.05 s"):
        engine.step()


def test_silence_and_ends_are_found() -> None:
    door = Door("127.0.0.1", bytes(32))
    theirs, ours = {}, {}
    for rank in range(2):
        theirs[rank] = TcpLink.connect(door.address, bytes(32), 5.0)
        link = door.accept(5.0)
        assert link is not None
        ours[rank] = link
    lifelines = Lifelines(ours)
    for _ in range(4):
        theirs[0].send(b"", 1.0)
        assert lifelines.find_lost(0.02, 60.0) is None
    theirs[1].send(b"", 1.0)
    found = None
    while found is None:
        theirs[0].send(b"", 1.0)
        found = lifelines.find_lost(0.02, 0.2)
    assert found.startswith("shard 1 has said nothing for 0.")
    theirs[0].close()
    assert lifelines.find_lost(5.0, 60.0) == "the process of shard 0 has ended"
