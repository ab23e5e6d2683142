"""What `benchmarks.http_cost` measures: the application over an engine that costs nothing, and stubs beside it.

A request is that of /v1/completions; its `max_tokens` says how many events it gets, and its `seed` how many a second, 0
for as many as can be.
"""

import asyncio
import heapq
import json
import math
import os
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ray
from ray import serve
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from app.building import build_application
from app.engine_deployment import EngineDeployment
from app.openai.responses import CompletionFormat, Part, event
from app.replica import EngineReplica
from app.settings import load_settings
from engine.config import EngineConfig
from engine.engine import EngineInfo
from engine.outputs import EngineStats, Finished, FinishReason, StepOutput
from engine.sampling_params import SamplingParams
from tests import tiny_models

TOKEN_ID = 100
MAX_TOTAL_TOKENS = 1_000_000


def next_step(now: float, rate: int) -> float:
    """When the next step begins of those that all streams of `rate` a second share."""
    return (math.floor(now * rate) + 1) / rate


class StandInLoop:
    """A step loop (see `engine.step_loop.StepLoop`) whose tokens cost nothing.

    Requests with a rate get their first token at once, and the others in steps that all of that rate share, as an
    engine's would be. Those without get one in each step, and a step is made as soon as the last one has been taken, so
    that none is added to another.
    """

    failed = False

    def __init__(self, on_output: Callable[[StepOutput], None], is_taken: Callable[[], bool]) -> None:
        self._on_output = on_output
        self._is_taken = is_taken
        self._wake = threading.Condition()
        self._left: dict[str, int] = {}
        self._made: dict[str, int] = {}
        self._hurried: dict[str, None] = {}
        self._due: list[tuple[float, str, int]] = []
        self._ended: list[Finished] = []
        self.engine = self
        self.info = EngineInfo(None, MAX_TOTAL_TOKENS, 1024, 16, 1024, 384, "cpu", "float32")
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(
        self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams, output_ids: Sequence[int], **_: Any
    ) -> None:
        with self._wake:
            self._left[request_id] = params.max_tokens or 1
            self._made[request_id] = 0
            if params.seed:
                heapq.heappush(self._due, (time.monotonic(), request_id, params.seed))
            else:
                self._hurried[request_id] = None
            self._wake.notify()

    def abort(self, request_id: str) -> None:
        with self._wake:
            self._end(request_id, FinishReason.ABORT)
            self._wake.notify()

    def compile_grammar(self, _: SamplingParams) -> None:
        return None

    def check_health(self, _: float) -> None: ...

    def close(self) -> None: ...

    def stats(self) -> EngineStats:
        return EngineStats(len(self._left), 0, 1024, 0, 0, 1024, 0, 0, 0, 0, 0, 0)

    def _end(self, request_id: str, reason: FinishReason) -> None:
        if self._left.pop(request_id, None) is not None:
            self._hurried.pop(request_id, None)
            self._ended.append(Finished(request_id, reason, 1, self._made.pop(request_id), 0))

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._hurried or self._ended):
                    pause = self._due[0][0] - time.monotonic() if self._due else None
                    if pause is not None and pause <= 0:
                        break
                    self._wake.wait(pause)
                ids = [*self._hurried, *self._those_due()]
                for request_id in ids:
                    self._made[request_id] += 1
                    self._left[request_id] -= 1
                    if not self._left[request_id]:
                        self._end(request_id, FinishReason.LENGTH)
                ended, self._ended = self._ended, []
            self._on_output(StepOutput(ids, [TOKEN_ID] * len(ids), ended))
            while self._hurried and not self._is_taken():
                time.sleep(0.0001)

    def _those_due(self) -> Iterator[str]:
        now = time.monotonic()
        while self._due and self._due[0][0] <= now:
            _, request_id, rate = heapq.heappop(self._due)
            if request_id in self._left:
                heapq.heappush(self._due, (next_step(now, rate), request_id, rate))
                yield request_id


class StandInReplica(EngineReplica):
    def __init__(self) -> None:
        super().__init__(lambda on_output: StandInLoop(on_output, self._all_taken))

    def _on_output(self, output: StepOutput) -> None:
        self._handed_over = False
        super()._on_output(output)

    def _deliver(self, output: StepOutput) -> None:
        super()._deliver(output)
        self._handed_over = True

    def _all_taken(self) -> bool:
        return self._handed_over and not any(outbox.waiting for outbox in list(self._outboxes.values()))


class StandInDeployment(EngineDeployment):
    def __init__(self, _: EngineConfig) -> None:
        self._replica = StandInReplica()


def ours(folder: Path) -> Any:
    model = tiny_models.llama(folder / "tiny")
    settings = load_settings(
        {"model": str(model), "served_model_name": "tiny", "max_num_seqs": 512, "log_level": "WARNING"}
    )
    return build_application(settings, StandInDeployment)


CONSTANT = event(CompletionFormat(model="tiny").chunk(0, Part(" the")))


async def _constant_events(count: int, rate: int, in_steps: bool = False) -> AsyncIterator[bytes]:
    due = time.monotonic()
    for _ in range(count):
        yield CONSTANT
        if rate:
            due = next_step(time.monotonic(), rate) if in_steps else due + 1 / rate
        # One turn of the loop even without a rate: as another's token would come between.
        await asyncio.sleep(max(0.0, due - time.monotonic()) if rate else 0)


class ConstantIngress:
    def __init__(self, in_steps: bool = False) -> None:
        """in_steps: whether the events of all streams come at the same moments, as an engine's do."""
        self._in_steps = in_steps

    async def __serve_build_asgi_app__(self) -> Starlette:
        return Starlette(routes=[Route("/v1/completions", self._complete, methods=["POST"])])

    async def _complete(self, request: Request) -> StreamingResponse:
        body = json.loads(await request.body())
        events = _constant_events(body["max_tokens"], body["seed"], self._in_steps)
        return StreamingResponse(events, media_type="text/event-stream")


class ConstantEngine:
    async def run(self, count: int, rate: int) -> AsyncIterator[bytes]:
        async for data in _constant_events(count, rate):
            yield data


class RelayIngress:
    """Ray's default way: a streaming call of the handle for each request, a message for each token."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine.options(stream=True)

    async def __serve_build_asgi_app__(self) -> Starlette:
        return Starlette(routes=[Route("/v1/completions", self._complete, methods=["POST"])])

    async def _complete(self, request: Request) -> StreamingResponse:
        body = json.loads(await request.body())
        return StreamingResponse(
            self._engine.run.remote(body["max_tokens"], body["seed"]), media_type="text/event-stream"
        )


MANY: dict[str, Any] = {"max_ongoing_requests": 10_000, "ray_actor_options": {"num_cpus": 0.1}}


def one_hop(_: Path) -> Any:
    return serve.deployment(serve.ingress()(ConstantIngress), name="ingress", **MANY).bind()


def one_hop_in_steps(_: Path) -> Any:
    return serve.deployment(serve.ingress()(ConstantIngress), name="ingress", **MANY).bind(in_steps=True)


def two_hops(_: Path) -> Any:
    engine = serve.deployment(ConstantEngine, name="engine", **MANY)
    return serve.deployment(serve.ingress()(RelayIngress), name="ingress", **MANY).bind(engine.bind())


SERVERS = {"ours": ours, "one-hop": one_hop, "one-hop-in-steps": one_hop_in_steps, "two-hops": two_hops}


def main() -> None:
    """`python -m benchmarks.servers.no_engine NAME PORT`: says "ready" and serves until its input is closed."""
    name, port = sys.argv[1], int(sys.argv[2])
    with tempfile.TemporaryDirectory() as folder:
        ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, namespace="serve")
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            from benchmarks.servers import no_engine  # not __main__, which replicas could not import

            serve.run(no_engine.SERVERS[name](Path(folder)), name=f"{name}-{os.getpid()}", route_prefix="/")
            print("ready", flush=True)
            sys.stdin.read()
        finally:
            serve.shutdown()
            ray.shutdown()


if __name__ == "__main__":
    main()
