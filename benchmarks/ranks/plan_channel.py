"""What it costs to bring a step's plan to all ranks and the result back, beside other ways to do so."""

import multiprocessing
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import ray
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from engine.remote.shm_ring import Ring, RingReader, RingWriter
from engine.remote.step_wire import PlanDecoder, PlanEncoder, decode_result, encode_result
from engine.remote.tcp_link import Door, TcpLink
from engine.step import BlockUpdates, SamplingMode, StepPlan, StepResult

ROUNDS = 3
STEPS = 400
PAUSE_S = 0.0005
"""Between two steps: those who wait are asleep, as they are while a model computes."""

TIMEOUT_S = 60.0
KEY = bytes(32)
WAYS = ("ring", "tcp", "gloo broadcast, flat", "gloo broadcast, objects", "actor calls")

spawn = multiprocessing.get_context("spawn")


def decode_plan_of(sequences: int) -> StepPlan:
    """Of a decode step with one block that fills."""

    def ints(length: int) -> Any:
        return np.arange(length, dtype=np.int32)

    s = sequences
    return StepPlan(
        rows=ints(s),
        query_start=ints(s + 1),
        seq_lens=ints(s),
        token_ids=ints(s),
        positions=ints(s),
        slots=np.arange(s, dtype=np.int64),
        sample=ints(s),
        mode=SamplingMode.GREEDY,
        block_updates=BlockUpdates(ints(1), ints(1), ints(1)),
    )


def answer(plan: StepPlan) -> StepResult:
    return StepResult(plan.positions.astype(np.int64))


def ring_rank(plans: str, rank: int, results: str) -> None:
    reader, writer, decoder = RingReader(Ring.open(plans), rank), RingWriter(Ring.open(results)), PlanDecoder()
    while message := reader.receive(TIMEOUT_S):
        result = answer(decoder.decode(message))
        if rank == 0:
            writer.send(encode_result(result), TIMEOUT_S)


def tcp_rank(address: tuple[str, int], rank: int) -> None:
    link, decoder = TcpLink.connect(address, KEY, TIMEOUT_S), PlanDecoder()
    link.send(bytes([rank]), TIMEOUT_S)
    while message := link.receive(TIMEOUT_S):
        result = answer(decoder.decode(message))
        if rank == 0:
            link.send(encode_result(result), TIMEOUT_S)


def meet(port: int, rank: int, size: int) -> None:
    """The leader is rank 0 of this group, and rank i of the model its rank i + 1."""
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, size, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT_S))


def gloo_rank(port: int, rank: int, size: int, sequences: int) -> None:
    """A command says which way the next step goes: 0 end, 1 flat, 2 objects, so many steps."""
    meet(port, rank + 1, size)
    command = torch.zeros(2, dtype=torch.int64)
    result = torch.zeros(sequences, dtype=torch.int64)
    while True:
        dist.broadcast(command, 0)
        kind, length = command.tolist()
        if not kind:
            break
        for _ in range(STEPS):
            if kind == 1:
                buffer = torch.empty(length, dtype=torch.uint8)
                dist.broadcast(buffer, 0)
                decoder = PlanDecoder()
                decoded = decoder.decode(bytearray(buffer.numpy()))
            else:
                objects: list[Any] = [None]
                dist.broadcast_object_list(objects, 0)
                (decoded,) = objects
            if rank == 0:
                result.copy_(torch.from_numpy(answer(decoded).token_ids))
                dist.send(result, 0)
    dist.destroy_process_group()


class ActorRank:
    def step(self, plan: StepPlan) -> StepResult:
        return answer(plan)


class Channels:
    """All ways to `size` ranks, each with processes of its own."""

    def __init__(self, size: int, sequences: int) -> None:
        self.size = size
        self.plan = decode_plan_of(sequences)
        self._processes: list[Any] = []
        self._plans, self._results = Ring.create(size), Ring.create(1)
        for rank in range(size):
            self._run(ring_rank, self._plans.address, rank, self._results.address)
        door = Door("127.0.0.1", KEY)
        for rank in range(size):
            self._run(tcp_rank, door.address, rank)
        store = TCPStore("127.0.0.1", 0, size + 1, is_master=True, wait_for_workers=False)
        for rank in range(size):
            self._run(gloo_rank, store.port, rank, size + 1, sequences)
        actor_class: Any = ray.remote(num_cpus=0)(ActorRank)
        self._actors = [actor_class.remote() for _ in range(size)]
        ray.get([actor.step.remote(self.plan) for actor in self._actors])
        links = [door.accept(TIMEOUT_S) for _ in range(size)]
        self._links = {link.receive(TIMEOUT_S)[0]: link for link in links if link is not None}
        meet(store.port, 0, size + 1)
        self._writer, self._reader = RingWriter(self._plans), RingReader(self._results, 0)
        self._ring_encoder, self._tcp_encoder = PlanEncoder(), PlanEncoder()
        self._gloo_result = torch.zeros(sequences, dtype=torch.int64)

    def _run(self, target: Callable[..., None], *args: Any) -> None:
        self._processes.append(spawn.Process(target=target, args=args, daemon=True))
        self._processes[-1].start()

    def ring(self) -> None:
        self._writer.send(self._ring_encoder.encode(self.plan), TIMEOUT_S)
        decode_result(self._reader.receive(TIMEOUT_S))

    def tcp(self) -> None:
        message = self._tcp_encoder.encode(self.plan)
        for link in self._links.values():
            link.send(message, TIMEOUT_S)
        decode_result(self._links[0].receive(TIMEOUT_S))

    def flat(self) -> None:
        dist.broadcast(torch.frombuffer(bytearray(PlanEncoder().encode(self.plan)), dtype=torch.uint8), 0)
        dist.recv(self._gloo_result, 1)

    def objects(self) -> None:
        dist.broadcast_object_list([self.plan], 0)
        dist.recv(self._gloo_result, 1)

    def actors(self) -> None:
        ray.get([actor.step.remote(self.plan) for actor in self._actors])

    def measure(self) -> dict[str, list[float]]:
        """Seconds of steps by way, in alternation; of the first round none."""
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        steps = dict(zip(WAYS, (self.ring, self.tcp, self.flat, self.objects, self.actors), strict=True))
        length = len(PlanEncoder().encode(self.plan))
        for i in range(ROUNDS + 1):
            for way, step in steps.items():
                if way.startswith("gloo"):
                    dist.broadcast(torch.tensor([1 + (way == WAYS[3]), length]), 0)
                for _ in range(STEPS):
                    began = time.perf_counter()
                    step()
                    if i:
                        times[way].append(time.perf_counter() - began)
                    time.sleep(PAUSE_S)
        return times

    def close(self) -> None:
        self._writer.send(b"", TIMEOUT_S)
        for link in self._links.values():
            link.send(b"", TIMEOUT_S)
        dist.broadcast(torch.zeros(2, dtype=torch.int64), 0)
        dist.destroy_process_group()
        for actor in self._actors:
            ray.kill(actor)
        for process in self._processes:
            process.join(TIMEOUT_S)


def measure(size: int, sequences: int) -> list[dict[str, Any]]:
    channels = Channels(size, sequences)
    try:
        times = channels.measure()
    finally:
        channels.close()
    rows = []
    for way, seconds in times.items():
        p50, p90, p99 = (float(value) * 1e6 for value in np.percentile(seconds, [50, 90, 99]))
        rows.append(
            {
                "ranks": size,
                "sequences": sequences,
                "way": way,
                "p50_us": round(p50),
                "p90_us": round(p90),
                "p99_us": round(p99),
            }
        )
    return rows
