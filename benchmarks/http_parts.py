"""The work of a token between the engine's step and the socket, piece by piece, in one process and with no network.

    python -m benchmarks.http_parts

In us a token, 64 sequences in a step:

engine loop: planning, block growth, stop checks, output, as in `benchmarks.host_overhead`.
transport: a step's message put together, pickled, read, and handed to its streams; without Serve's own cost of a
    message, which is `benchmarks.http_cost`'s to show and is shared by all tokens of a step.
detokenise: token ids to text that may be shown.
sse: text to the bytes of an event.
rest: the event loop's turns, generators and bookkeeping around these; `whole` is the ingress's side in all.
"""

import asyncio
import json
import pickle
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from app.admission import Admission, Budget
from app.engine_client import EngineLimits
from app.failover import FailoverClient
from app.http.streaming import EventStream
from app.openai.completion_request import CompletionRequest
from app.openai.responses import CompletionFormat
from app.prompts.chat import ChatSide
from app.prompts.chat_template import chat_templates
from app.service.service import Service
from app.transport.outbox import Outbox
from app.transport.serve_client import ServeEngineClient
from benchmarks.host_overhead import measure
from engine.outputs import StepOutput
from engine.text.detokenizer import Detokenizer
from engine.text.tokenizer import load_tokenizer
from tests import tiny_models

SEQUENCES = 64
STEPS = 400
TOKEN_ID = 100


class SilentHandle:
    """A handle whose calls never say anything."""

    def options(self, **_: Any) -> "SilentHandle":
        return self

    @property
    def submit(self) -> "SilentHandle":
        return self

    def remote(self, *_: Any) -> "SilentHandle":
        return self

    def cancel(self) -> None: ...

    def broadcast(self, *_: Any) -> "SilentHandle":
        return self

    async def _fetch_replica_results_async(self) -> list[Any]:
        return []

    def __aiter__(self) -> "SilentHandle":
        return self

    async def __anext__(self) -> Any:
        await asyncio.get_running_loop().create_future()


def parts() -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = load_tokenizer(tiny_models.llama(Path(folder) / "tiny"))
    whole, deliver = asyncio.run(_ingress(tokenizer))
    detokenizers = [Detokenizer(tokenizer) for _ in range(SEQUENCES)]
    found = {
        "engine_loop": measure(SEQUENCES, 300, overlap=False)["us_median"] / SEQUENCES,
        "transport": asyncio.run(_messages()) + deliver,
        "detokenise": _each(lambda i: detokenizers[i].push([TOKEN_ID])),
        "sse": _each(_format(CompletionFormat(model="tiny"))),
    }
    found["rest"] = whole - deliver - found["detokenise"] - found["sse"]
    found["whole"] = whole
    return {name: round(value, 2) for name, value in found.items()}


def _format(form: CompletionFormat) -> Callable[[int], Any]:
    return lambda i: form.text_event(0, " the")


def _each(function: Callable[[int], Any]) -> float:
    start = time.perf_counter()
    for _ in range(STEPS):
        for i in range(SEQUENCES):
            function(i)
    return (time.perf_counter() - start) / STEPS / SEQUENCES * 1e6


def _output(ids: list[str]) -> StepOutput:
    return StepOutput(list(ids), [TOKEN_ID] * len(ids))


async def _messages() -> float:
    """A step's tokens into an outbox, out of it, and to bytes and back."""
    ids = [f"cmpl-{i:032x}" for i in range(SEQUENCES)]
    outbox = Outbox(1)
    start = time.perf_counter()
    for _ in range(STEPS):
        outbox.put(_output(ids))
        pickle.loads(pickle.dumps(await outbox.take(), pickle.HIGHEST_PROTOCOL))
    return (time.perf_counter() - start) / STEPS / SEQUENCES * 1e6


async def _ingress(tokenizer: Any) -> tuple[float, float]:
    """Of a step's tokens: from the message that came to the bytes of their events; and the handing out alone."""
    client = ServeEngineClient(SilentHandle())
    service = Service(
        "tiny",
        tokenizer,
        FailoverClient(client, 3),
        EngineLimits(100_000, SEQUENCES, 16, 384, 100_000),
        Admission(Budget(SEQUENCES), 0),
        ChatSide(chat_templates(tokenizer, None), "auto", "auto"),
    )
    sent = 0

    async def send(message: Any) -> None:
        nonlocal sent
        sent += 1

    streams = []
    for _ in range(SEQUENCES):
        answer = await service.complete(CompletionRequest(prompt=["hello"], stream=True, max_tokens=90_000))
        streams.append(asyncio.ensure_future(EventStream(answer.chunks(), 5.0)(send)))
    while len(client._open) < SEQUENCES:
        await asyncio.sleep(0)
    ids = list(client._open)
    handing_out, sent = 0.0, 0
    start = time.perf_counter()
    for step in range(STEPS):
        begin = time.perf_counter()
        client._deliver(_output(ids))
        handing_out += time.perf_counter() - begin
        while sent < SEQUENCES * step:
            await asyncio.sleep(0)
    whole = time.perf_counter() - start
    for stream in streams:
        stream.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    us = 1e6 / STEPS / SEQUENCES
    return whole * us, handing_out * us


if __name__ == "__main__":
    print(json.dumps(parts()))
