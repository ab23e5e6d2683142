"""What a plain request costs in the ingress: everything but the network, Serve and the engine.

    python -m benchmarks.http_overhead [--requests N] [--tokens N] [--json]

Calls the ASGI application in this process, with a stand-in for the engine that has its tokens ready: parsing,
validation, the chat template, tokenising, admission, detokenising, formatting. One request after the other, plain and
greedy.

whole: microseconds for a chat answered in one piece. stream: for the same as server-sent events, one token each. The
median over the requests, after some to warm up.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any, Self

from app.admission import Admission, Budget
from app.engine_client import Delivery, EngineLimits, Submission
from app.http.routes import create_app
from app.prompts.chat import ChatSide
from app.prompts.chat_template import chat_templates
from app.service.catalog import Catalog
from app.service.service import Service
from engine.config import DEFAULT_MODEL
from engine.hub import resolve_model
from engine.lora.request import LoRARequest
from engine.outputs import EngineStats, Finished, FinishReason
from engine.text.tokenizer import load_tokenizer

CONTENT = "What is the capital of France? Answer in one word, and say how sure you are of it."


class ReadyStream:
    """One token a delivery, all of them there already."""

    def __init__(self, submission: Submission, tokens: Sequence[int]) -> None:
        self._submission = submission
        self._tokens = iter(tokens)
        self._count = self._left = len(tokens)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delivery:
        token = next(self._tokens)
        self._left -= 1
        if self._left:
            return Delivery([token])
        prompt = len(self._submission.prompt_ids)
        return Delivery([token], Finished(self._submission.request_id, FinishReason.LENGTH, prompt, self._count, 0))

    def close(self) -> None:
        pass


class ReadyEngine:
    """`app.engine_client.EngineClient` with the same answer to everything."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens

    async def limits(self) -> EngineLimits:
        return EngineLimits(max_total_tokens=2048, max_num_seqs=64, block_size=16, vocab_size=49_152, kv_tokens=2**20)

    async def stats(self) -> list[EngineStats]:
        return []

    async def check_health(self) -> None:
        pass

    async def load_adapter(self, request: LoRARequest) -> str:
        raise RuntimeError("no adapters here")

    def submit(self, submission: Submission) -> ReadyStream:
        return ReadyStream(submission, self._tokens)


async def measure(requests: int, tokens: int) -> dict[str, float]:
    """Median microseconds of a request, whole and streamed."""
    tokenizer = load_tokenizer(resolve_model(DEFAULT_MODEL))
    text = tokenizer.encode(" The capital of France is Paris, and I am quite sure of it." * tokens)
    client = ReadyEngine(text[:tokens])
    chat_side = ChatSide(chat_templates(tokenizer, None))
    service = Service("model", tokenizer, client, await client.limits(), Admission(Budget(80), 256), chat_side)
    app = create_app(Catalog([service]), 5.0)
    body = {"messages": [{"role": "user", "content": CONTENT}], "max_tokens": tokens, "temperature": 0}
    times: dict[str, list[float]] = {"whole": [], "stream": []}
    for _ in range(requests):
        for kind, more in (("whole", {}), ("stream", {"stream": True})):
            times[kind].append(await _seconds(app, json.dumps(body | more).encode()))
    warm = requests // 4
    return {kind: round(1e6 * statistics.median(values[warm:]), 1) for kind, values in times.items()}


async def _seconds(app: Any, body: bytes) -> float:
    sent: list[dict[str, Any]] = []
    received = False
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": "/v1/chat/completions",
        "raw_path": b"/v1/chat/completions",
        "root_path": "",
        "scheme": "http",
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }

    async def receive() -> dict[str, Any]:
        nonlocal received
        if received:
            await asyncio.Event().wait()  # the client stays
        received = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    start = time.perf_counter()
    await app(scope, receive, send)
    elapsed = time.perf_counter() - start
    assert sent[0]["status"] == 200, sent
    return elapsed


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    row = {"tokens": args.tokens} | asyncio.run(measure(args.requests, args.tokens))
    if args.json:
        print(json.dumps(row))
    else:
        print(f"{args.tokens} tokens: whole {row['whole']} us, stream {row['stream']} us")


if __name__ == "__main__":
    main()
