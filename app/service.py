"""What the endpoints do, with no HTTP in it: a parsed request in, bodies and chunks out."""

import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from app.admission import Admission
from app.engine_client import EngineClient, EngineLimits
from app.generation import Job, TextGenerator
from app.openai.errors import ApiError
from app.openai.requests import ChatRequest, CompletionRequest, GenerationRequest
from app.openai.responses import Body, ChatFormat, Choice, CompletionFormat, Format, Usage, model_card
from app.text import PromptEncoder
from engine.outputs import FinishReason
from engine.sampling_params import SamplingParams
from engine.tokenizer import Tokenizer


class Answer:
    """An answer about to be made: read it as a whole or as a stream, once.

    prefixes: text before each choice's own (an echoed prompt).
    """

    def __init__(
        self, generator: TextGenerator, jobs: Sequence[Job], form: Format, prefixes: Sequence[str] | None = None
    ) -> None:
        self._generator = generator
        self._jobs = jobs
        self._format = form
        self._prefixes = prefixes or [""] * len(jobs)

    async def whole(self) -> Body:
        texts = list(self._prefixes)
        reasons = [""] * len(texts)
        total = Usage()
        async with aclosing(self._generator.run(self._jobs)) as deltas:
            async for delta in deltas:
                texts[delta.index] += delta.text
                if delta.finish_reason is not None:
                    reasons[delta.index] = delta.finish_reason
                    total.add(delta.usage or Usage())
        choices = [Choice(text, reason) for text, reason in zip(texts, reasons, strict=True)]
        return self._format.whole(choices, total)

    async def chunks(self) -> AsyncGenerator[Body, None]:
        form, total = self._format, Usage()
        opened: set[int] = set()
        async with aclosing(self._generator.run(self._jobs)) as deltas:
            async for delta in deltas:
                index, text = delta.index, delta.text
                if index not in opened:
                    opened.add(index)
                    text = self._prefixes[index] + text
                    for chunk in form.opening(index):
                        yield chunk
                if text:
                    yield form.text(index, text)
                if delta.finish_reason is not None:
                    yield form.finish(index, delta.finish_reason)
                    total.add(delta.usage or Usage())
        if form.include_usage:
            yield form.usage(total)


class PromptOnlyAnswer:
    """The answer to max_tokens 0: no token is made; the prompts come back if that was asked for."""

    def __init__(self, form: Format, texts: Sequence[str], prompt_tokens: int) -> None:
        self._format = form
        self._choices = [Choice(text, FinishReason.LENGTH) for text in texts]
        self._usage = Usage(prompt_tokens)

    async def whole(self) -> Body:
        return self._format.whole(self._choices, self._usage)

    async def chunks(self) -> AsyncGenerator[Body, None]:
        for index, choice in enumerate(self._choices):
            if choice.text:
                yield self._format.text(index, choice.text)
            yield self._format.finish(index, choice.finish_reason)
        if self._format.include_usage:
            yield self._format.usage(self._usage)


class Service:
    """One served model: its name, its text side, and the way to its engine."""

    def __init__(
        self,
        name: str,
        tokenizer: Tokenizer,
        client: EngineClient,
        limits: EngineLimits,
        admission: Admission,
    ) -> None:
        self.name = name
        self.client = client
        self.admission = admission
        self._created = int(time.time())
        self._limits = limits
        self._tokenizer = tokenizer
        self._encoder = PromptEncoder(tokenizer, limits.max_total_tokens, limits.vocab_size)
        self._generator = TextGenerator(client, admission, tokenizer, limits.block_size)

    async def chat(self, request: ChatRequest) -> Answer:
        """Raises `ApiError`, `InvalidRequestError`, `QueueFullError`."""
        self._check_model(request)
        params = _with_seed(request.sampling_params())
        self.admission.check()
        prompt_ids = await self._encoder.chat([message.for_template() for message in request.messages])
        form = ChatFormat(model=self.name, include_usage=request.include_usage)
        return Answer(self._generator, [Job(0, form.id, prompt_ids, params, request.cache_salt)], form)

    async def complete(self, request: CompletionRequest) -> Answer | PromptOnlyAnswer:
        """Raises `ApiError`, `InvalidRequestError`, `QueueFullError`."""
        self._check_model(request)
        params = _with_seed(request.sampling_params())
        self.admission.check()
        prompts = await self._encoder.prompts(request.prompt)
        echoes = self._echoes(request)
        form = CompletionFormat(model=self.name, include_usage=request.include_usage)
        if not request.generates:
            return PromptOnlyAnswer(form, echoes, sum(map(len, prompts)))
        jobs = [
            Job(index, f"{form.id}-{index}", prompt_ids, params, request.cache_salt)
            for index, prompt_ids in enumerate(prompts)
        ]
        return Answer(self._generator, jobs, form, echoes)

    def models(self) -> Body:
        return {"object": "list", "data": [self.model(self.name)]}

    def model(self, name: str) -> Body:
        """Raises `ApiError` 404."""
        self._check_name(name)
        return model_card(name, self._created, self._limits.max_total_tokens)

    def _check_model(self, request: GenerationRequest) -> None:
        if request.model is not None:
            self._check_name(request.model)

    def _check_name(self, name: str) -> None:
        if name != self.name:
            message = f"The model {name[:200]!r} does not exist here; this server has {self.name!r}."
            raise ApiError(404, message, param="model", code="model_not_found")

    def _echoes(self, request: CompletionRequest) -> list[str]:
        """The text of each prompt as it was given, or nothing if no echo was asked for."""
        if not request.echo:
            return [""] * len(request.prompt)
        return [p if isinstance(p, str) else self._tokenizer.decode(p, False) for p in request.prompt]


def _with_seed(params: SamplingParams) -> SamplingParams:
    """A missing seed is drawn here, so that the request could go on elsewhere with the same randomness."""
    return params if params.seed is not None else replace(params, seed=secrets.randbits(63))
