"""From prompts to text: one engine request for each prompt, its tokens detokenised, its stop strings found."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from app.admission import Admission, Claim, Ticket
from app.engine_client import Delivery, EngineClient, Submission
from app.openai.errors import EngineFault
from app.openai.responses import Usage
from app.openai.token_entries import EntryAligner, TokenEntry
from app.reports.request_stats import RequestStats
from app.service.caller import current_caller
from engine.block_hash import block_hashes
from engine.lora.request import LoRARequest
from engine.outputs import Finished, FinishReason, TokenLogprobs
from engine.sampling_params import SamplingParams
from engine.text.detokenizer import Detokenizer
from engine.text.token_text import TokenTexts
from engine.text.tokenizer import Tokenizer

EXPECTED_OUTPUT = 256
"""Tokens of output that a request is admitted for; most end before their limit, or have none."""

_DELTAS_AHEAD = 16
"""Deltas that one prompt may be ahead of the reader when several run."""


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt to complete, once.

    index: of its choice in the answer.
    is_batch: whether it only uses what nobody else wants.
    text_offset: characters of the choice's text before the output's. return_token_ids: whether deltas carry them.
    counts_prompt: whether the prompt counts in the usage: in that of one of its outputs.
    scores_end: whether the EOS or stop token that ends the output has an entry too, after all text.
    lora: the adapter that it runs with.
    """

    index: int
    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    cache_salt: str | None = None
    priority: int = 0
    is_batch: bool = False
    text_offset: int = 0
    return_token_ids: bool = False
    counts_prompt: bool = True
    scores_end: bool = False
    lora: LoRARequest | None = None


@dataclass(slots=True)  # not frozen, which would make it three times as slow to make, for each token
class Delta:
    """New text of one choice. The first comes with the first token, its text perhaps still held back.

    finish_reason and usage: of the choice's last delta only.
    entries: log probabilities of the tokens whose text begins here, if they were asked for.
    token_ids: new tokens, if they were asked for: of the text, of what is held back, and what ended it.
    prompt_logprobs: of the choice's first delta, if they were asked for; prompt_entries: what an echo shows of them.
    """

    index: int
    text: str
    finish_reason: str | None = None
    usage: Usage | None = None
    entries: Sequence[TokenEntry] = ()
    token_ids: Sequence[int] = ()
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    prompt_entries: Sequence[TokenEntry] = ()


class TextGenerator:
    """Runs jobs on the engine, under the rule of the admission queue."""

    def __init__(self, client: EngineClient, admission: Admission, tokenizer: Tokenizer, block_size: int) -> None:
        self._client = client
        self._admission = admission
        self._tokenizer = tokenizer
        self._block_size = block_size
        self._texts = _Texts(tokenizer)
        self.stats = RequestStats()

    async def run(self, jobs: Sequence[Job]) -> AsyncGenerator[Delta, None]:
        """Deltas of all jobs as they come. Closing it, or cancelling its reader, aborts them.

        Raises `QueueFullError` before the first delta, and what `TokenStream` raises.
        """
        tickets = self._admission.reserve([_claim(job) for job in jobs])
        try:
            hashes = _PromptHashes(self._block_size)
            streams = [self._run_one(job, ticket, hashes) for job, ticket in zip(jobs, tickets, strict=True)]
            async with aclosing(streams[0] if len(streams) == 1 else _merge(streams)) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            for ticket in tickets:  # those of jobs that have not begun as well
                ticket.release()

    async def _run_one(self, job: Job, ticket: Ticket, hashes: "_PromptHashes") -> AsyncGenerator[Delta, None]:
        params = job.params
        output = _Output(job, self._tokenizer, self._texts)
        stats, stream = self.stats, None
        arrived = first = time.monotonic()
        try:
            await ticket.granted()
            stats.queue_s.observe(time.monotonic() - arrived)
            stream = self._client.submit(
                Submission(
                    job.request_id,
                    job.prompt_ids,
                    params,
                    block_hashes=hashes.of(job),
                    cache_salt=job.cache_salt,
                    priority=job.priority,
                    tenant=ticket.claim.tenant,
                    is_batch=job.is_batch,
                    session=current_caller().session,
                    lora=job.lora,
                )
            )
            started = False
            async for delivery in stream:
                delta = output.take(delivery)
                reason = delta.finish_reason
                if not started:
                    started, first = True, time.monotonic()
                    stats.first_token_s.observe(first - arrived)
                elif not (delta.text or reason is not None or delta.token_ids or delta.entries):
                    continue
                if reason is not None:
                    stats.end(reason, output.num_tokens, arrived, first, time.monotonic())
                yield delta
                if reason is not None:
                    return
        finally:
            # Plain calls only: an await in the `finally` of a cancelled stream may never return.
            if stream is not None:
                stream.close()
            ticket.release()


def _claim(job: Job) -> Claim:
    limit = job.params.max_tokens
    output = EXPECTED_OUTPUT if limit is None else min(limit, EXPECTED_OUTPUT)
    return Claim(len(job.prompt_ids) + output, current_caller().tenant, job.priority, job.is_batch)


class _Output:
    """One job's tokens on their way to text."""

    def __init__(self, job: Job, tokenizer: Tokenizer, texts: "_Texts") -> None:
        params = job.params
        self._job = job
        self._text = Detokenizer(
            tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            stop=params.stop_strings,
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )
        self._aligner: EntryAligner | None = None
        self._cached_tokens = 0
        self._shows_tokens = job.return_token_ids or params.logprobs is not None
        if params.logprobs is not None:
            self._aligner = EntryAligner(texts.of(params.skip_special_tokens), job.text_offset)

    @property
    def num_tokens(self) -> int:
        return self._text.num_tokens

    def take(self, delivery: Delivery) -> Delta:
        """Raises `EngineFault` if the request failed."""
        text, job, finished = self._text, self._job, delivery.finished
        before = text.num_tokens
        if delivery.cached_tokens:
            self._cached_tokens = delivery.cached_tokens
        visible = _visible(delivery.token_ids, finished, job.params)
        shown = text.push(visible)
        plain = not self._shows_tokens and delivery.prompt_logprobs is None
        if plain and finished is None and text.stop_reason is None:
            return Delta(job.index, shown)
        if finished is not None:
            shown += text.finish()
        reason, usage = self._end(finished)
        if plain:
            return Delta(job.index, shown, reason, usage)
        entries: Sequence[TokenEntry] = ()
        token_ids = delivery.token_ids
        if text.stop_reason is not None:
            token_ids = token_ids[: text.num_tokens - before]
        if self._aligner is not None:
            scored = token_ids if job.scores_end else visible[: len(token_ids)]
            self._aligner.push(scored, delivery.logprobs[: len(scored)])
            cut = text.stop_reason is not None
            entries = self._aligner.show(shown, end=reason is not None, cut=cut)
        return Delta(
            job.index,
            shown,
            reason,
            usage,
            entries,
            token_ids if job.return_token_ids else (),
            delivery.prompt_logprobs,
        )

    def _end(self, finished: Finished | None) -> tuple[str | None, Usage | None]:
        """Why the output ended, and its count: by a stop string, even if the engine gave another reason."""
        counted = self._job.counts_prompt
        num_prompt = len(self._job.prompt_ids) if counted else 0
        cached_tokens = self._cached_tokens if counted else 0
        if self._text.stop_reason is not None:
            return FinishReason.STOP, Usage(num_prompt, self._text.num_tokens, cached_tokens)
        if finished is None:
            return None, None
        _raise_if_failed(finished)
        return finished.reason, Usage(num_prompt, finished.num_output_tokens, cached_tokens)


class _Texts:
    """Texts of single tokens, with special ones shown and not."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._hiding = TokenTexts(tokenizer)
        self._showing = TokenTexts(tokenizer, skip_special_tokens=False)

    def of(self, skip_special_tokens: bool) -> TokenTexts:
        return self._hiding if skip_special_tokens else self._showing


class _PromptHashes:
    """Block hashes of the prompts of one answer; outputs of one prompt share the list, and so its hashes."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._last: tuple[list[int], list[bytes]] | None = None

    def of(self, job: Job) -> list[bytes]:
        if self._last is None or self._last[0] is not job.prompt_ids:
            adapter = "" if job.lora is None else job.lora.digest or ""
            hashes = block_hashes(job.prompt_ids, self._block_size, job.cache_salt, adapter=adapter)
            self._last = job.prompt_ids, hashes
        return self._last[1]


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
