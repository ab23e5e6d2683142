"""From prompts to text: one engine request for each prompt, its tokens detokenised, its stop strings found."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from app.admission import Admission, Ticket
from app.engine_client import EngineClient, Submission
from app.openai.errors import EngineFault
from app.openai.responses import Usage
from engine.block_hash import block_hashes
from engine.detokenizer import Detokenizer
from engine.outputs import Finished, FinishReason
from engine.sampling_params import SamplingParams
from engine.tokenizer import Tokenizer

_DELTAS_AHEAD = 16
"""Deltas that one prompt may be ahead of the reader when several run."""


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt to complete. index: of its choice in the answer."""

    index: int
    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of one choice. The first comes with the first token, its text perhaps still held back.

    finish_reason and usage: of the choice's last delta only.
    """

    index: int
    text: str
    finish_reason: str | None = None
    usage: Usage | None = None


class TextGenerator:
    """Runs jobs on the engine, under the rule of the admission queue."""

    def __init__(self, client: EngineClient, admission: Admission, tokenizer: Tokenizer, block_size: int) -> None:
        self._client = client
        self._admission = admission
        self._tokenizer = tokenizer
        self._block_size = block_size

    async def run(self, jobs: Sequence[Job]) -> AsyncGenerator[Delta, None]:
        """Deltas of all jobs as they come. Closing it, or cancelling its reader, aborts them.

        Raises `QueueFullError` before the first delta, and what `TokenStream` raises.
        """
        tickets = self._admission.reserve(len(jobs))
        try:
            streams = [self._run_one(job, ticket) for job, ticket in zip(jobs, tickets, strict=True)]
            async with aclosing(streams[0] if len(streams) == 1 else _merge(streams)) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            for ticket in tickets:  # those of jobs that have not begun as well
                ticket.release()

    async def _run_one(self, job: Job, ticket: Ticket) -> AsyncGenerator[Delta, None]:
        params = job.params
        text = Detokenizer(
            self._tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            stop=params.stop_strings,
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )
        stream = None
        try:
            await ticket.granted()
            stream = self._client.submit(
                Submission(
                    job.request_id,
                    job.prompt_ids,
                    params,
                    block_hashes=block_hashes(job.prompt_ids, self._block_size, job.cache_salt),
                    cache_salt=job.cache_salt,
                )
            )
            started = False
            cached_tokens = 0
            async for delivery in stream:
                finished = delivery.finished
                shown = text.push(_visible(delivery.token_ids, finished, params))
                if finished is not None:
                    cached_tokens = finished.num_cached_tokens
                    shown += text.finish()
                if text.stop_reason is not None:
                    usage = Usage(len(job.prompt_ids), text.num_tokens, cached_tokens)
                    yield Delta(job.index, shown, FinishReason.STOP, usage)
                    return
                if finished is not None:
                    _raise_if_failed(finished)
                    usage = Usage(len(job.prompt_ids), finished.num_output_tokens, cached_tokens)
                    yield Delta(job.index, shown, finished.reason, usage)
                    return
                if shown or not started:
                    started = True
                    yield Delta(job.index, shown)
        finally:
            # Plain calls only: an await in the `finally` of a cancelled stream may never return.
            if stream is not None:
                stream.close()
            ticket.release()


def _visible(token_ids: list[int], finished: Finished | None, params: SamplingParams) -> list[int]:
    """Without the EOS or stop token, which ends the text and is none of it."""
    ended_by_token = finished is not None and finished.stop_token_id is not None
    return token_ids[:-1] if ended_by_token and not params.include_stop_str_in_output else token_ids


def _raise_if_failed(finished: Finished) -> None:
    if finished.reason is FinishReason.ERROR:
        raise EngineFault(f"The engine failed on this request: {finished.error}.")
    if finished.reason is FinishReason.ABORT:
        raise EngineFault("The engine ended this request before it was complete.")


async def _merge(streams: Sequence[AsyncGenerator[Delta, None]]) -> AsyncGenerator[Delta, None]:
    """Deltas of several streams as they come; the first error ends them all."""
    queue: asyncio.Queue[Delta | Exception | None] = asyncio.Queue(_DELTAS_AHEAD * len(streams))

    async def pump(stream: AsyncGenerator[Delta, None]) -> None:
        end: Exception | None = None
        try:
            async with aclosing(stream):
                async for delta in stream:
                    await queue.put(delta)
        except Exception as error:
            end = error
        await queue.put(end)

    tasks = [asyncio.ensure_future(pump(stream)) for stream in streams]
    try:
        left = len(streams)
        while left:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
