"""What the endpoints do, with no HTTP in it: a parsed request in, bodies and chunks out."""

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from app.admission import Admission
from app.engine_client import EngineClient, EngineLimits
from app.failover import FailoverClient, FailoverCounts
from app.off_loop import INLINE_SIZE, off_loop
from app.openai.chat_request import ChatRequest
from app.openai.completion_request import CompletionRequest
from app.openai.errors import ApiError
from app.openai.responses import Body, ChatFormat, CompletionFormat, model_card
from app.openai.sampling import GenerationRequest
from app.openai.structured import Structure
from app.openai.token_entries import PromptScorer
from app.openai.tokenization import MAX_CHARACTERS, DetokenizeRequest, TokenizeRequest
from app.prompts.chat import ChatSide, new_call_id
from app.prompts.chat_template import Chat, ChatTemplate
from app.prompts.encoding import PromptEncoder
from app.reports.pool import Pool
from app.reports.request_stats import IngressStats
from app.service.adapters import Adapters
from app.service.answers import Answer, GeneratedAnswer, PromptOnlyAnswer
from app.service.caller import current_caller
from app.service.choices import Assembler, Echo, ParsedText, PlainText
from app.service.generation import Job, TextGenerator
from engine.bad_words import expand
from engine.lora.request import LoRARequest
from engine.sampling_params import SamplingParams, children
from engine.text.token_text import TokenTexts
from engine.text.tokenizer import Tokenizer


class Service:
    """One served model: its name, its text side, and the way to its engine."""

    def __init__(
        self,
        name: str,
        tokenizer: Tokenizer,
        client: EngineClient,
        limits: EngineLimits,
        admission: Admission,
        chat_side: ChatSide,
        scales_to_zero: bool = False,
        default_sampling: Mapping[str, Any] | None = None,
        pool: Pool | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        """pool: what is known of the engine's replicas; nothing by default."""
        self.name = name
        self._pool = Pool() if pool is None else pool
        self.adapters = adapters or Adapters(name, client)
        self._default_sampling = default_sampling
        self.client = client
        self.admission = admission
        self._scales_to_zero = scales_to_zero
        self._created = int(time.time())
        self._limits = limits
        self._tokenizer = tokenizer
        self._chat_side = chat_side
        self._encoder = PromptEncoder(tokenizer, limits.max_total_tokens, limits.vocab_size)
        self._generator = TextGenerator(client, admission, tokenizer, limits.block_size)
        # Of prompts, in which special tokens are as they were written.
        self._prompt_texts = TokenTexts(tokenizer, skip_special_tokens=False)

    async def check_health(self) -> None:
        """Raise `EngineFault` if no engine replica can serve, unless none is there since nobody asks: the next request
        starts one."""
        if not (self._scales_to_zero and self._pool.known and not self._pool.num_replicas):
            await self.client.check_health()

    async def chat(self, request: ChatRequest) -> Answer:
        """Raises `ApiError`, `InvalidRequestError`, `QueueFullError`."""
        lora = self.adapters.find(request.model)
        params = request.sampling_params(_drawn_seed(), self._default_sampling)
        structure = request.structure()
        self.admission.check(current_caller().tenant, request.is_batch)
        template = self._chat_side.template(bool(request.offered_tools))
        chat = await self._chat(request, template)
        text, prompt_ids = await self._encoder.chat(template, chat)
        reader = self._chat_side.reader(request, template, text, constrained=structure is not None)
        if reader is not None and reader().needs_special_tokens:
            params = replace(params, skip_special_tokens=False)
        each = children(await self._prepared(params, structure))
        form = ChatFormat(
            model=request.model or self.name,
            include_usage=request.include_usage,
            logprobs=bool(request.logprobs),
            token_ids=bool(request.return_token_ids),
            prompts=[prompt_ids],
        )
        jobs = _jobs(form.id, request, [prompt_ids], each, lora)
        only_one = request.parallel_tool_calls is False
        assemblers: list[Assembler] = [
            PlainText() if reader is None else ParsedText(reader(), new_call_id, only_one) for _ in jobs
        ]
        scorers = self._scorers(jobs, request.prompt_logprobs, begins_with_added=False)
        return GeneratedAnswer(self._generator, jobs, form, assemblers, scorers)

    async def complete(self, request: CompletionRequest) -> Answer:
        """Raises `ApiError`, `InvalidRequestError`, `QueueFullError`."""
        lora = self.adapters.find(request.model)
        params = request.sampling_params(_drawn_seed(), self._default_sampling)
        structure = request.structure()
        self.admission.check(current_caller().tenant, request.is_batch)
        prompts = await self._encoder.prompts(request.prompt)
        echoes = self._echoes(request)
        form = CompletionFormat(
            model=request.model or self.name,
            include_usage=request.include_usage,
            logprobs=request.logprobs is not None,
            token_ids=bool(request.return_token_ids),
            prompts=[ids for ids in prompts for _ in range(request.n or 1)],
        )
        if not request.generates and not request.scores_prompt:
            texts = [text for text in echoes for _ in range(request.n or 1)]
            return PromptOnlyAnswer(form, texts, sum(map(len, prompts)))
        each = children(await self._prepared(params, structure))
        if request.scores_prompt:  # each choice shows the scores, so none can do without them
            each = [replace(child, prompt_logprobs=params.prompt_logprobs) for child in each]
        jobs = _jobs(form.id, request, prompts, each, lora, [len(text) for text in echoes], scores_end=True)
        added = isinstance(request.prompt[0], str) and self._adds_bos
        assemblers: list[Assembler] = [
            Echo(echoes[job.index // len(each)]) if request.echo else PlainText() for job in jobs
        ]
        return GeneratedAnswer(
            self._generator,
            jobs,
            form,
            assemblers,
            scorers=self._scorers(jobs, request.prompt_logprobs, added),
            echo_scorers=self._scorers(jobs, request.logprobs if request.echo else None, added),
            n=request.n or 1,
            best_of=len(each),
        )

    def stats(self) -> IngressStats:
        """Of this ingress alone."""
        counts = self.client.counts if isinstance(self.client, FailoverClient) else FailoverCounts()
        return IngressStats(
            self.admission.outstanding,
            self.admission.waiting,
            self._generator.stats,
            counts.resubmitted,
            counts.given_up,
            counts.longest_pause_s,
            self.admission.waiting_tokens,
            self.admission.capacity,
            self.admission.refused,
            self._pool.prompt_blocks,
            self._pool.hit_blocks,
            self._pool.routed(),
        )

    async def tokenize(self, request: TokenizeRequest) -> Body:
        """Raises `ApiError`, `InvalidRequestError`."""
        if request.messages is not None:
            template = self._chat_side.template(bool(request.tools))
            text = await self._encoder.render(template, await self._chat(request, template))
            if len(text) > MAX_CHARACTERS:
                raise ApiError(400, f"messages: more than {MAX_CHARACTERS} characters are too many.", param="messages")
        else:
            text = request.prompt or ""
        special = request.add_special_tokens
        if special is None:
            special = request.messages is None
        ids = await off_loop(self._tokenizer.encode, len(text), text, special)
        strings = self._tokenizer.hf.convert_ids_to_tokens(ids) if request.return_token_strs else None
        return {
            "count": len(ids),
            "max_model_len": self._limits.max_total_tokens,
            "tokens": ids,
            "token_strs": strings,
        }

    async def detokenize(self, request: DetokenizeRequest) -> Body:
        """Raises `ApiError`, `InvalidRequestError`."""
        ids = self._encoder.in_vocabulary(request.tokens, "tokens") if request.tokens else []
        return {"prompt": await off_loop(self._tokenizer.decode, len(ids), ids, False)}

    def cards(self) -> list[Body]:
        """Entries in the list of models: its own, and those of its adapters."""
        length = self._limits.max_total_tokens
        own = model_card(self.name, self._created, length, root=self.name, parent=None)
        return [
            own,
            *(
                model_card(adapter.name, adapter.created, length, root=adapter.request.lora_path, parent=self.name)
                for adapter in self.adapters.all()
            ),
        ]

    async def _chat(self, request: ChatRequest | TokenizeRequest, template: ChatTemplate) -> Chat:
        """Tools and calls may be of any size, and have JSON in them that is parsed here."""
        calls = bool(request.tools) or any(message.tool_calls for message in request.messages or ())
        return await off_loop(self._chat_side.chat, INLINE_SIZE + 1 if calls else 0, request, template)

    async def _prepared(self, params: SamplingParams, structure: Structure | None) -> SamplingParams:
        """With what needs the tokenizer or takes time."""
        if structure is not None:
            params = replace(params, structured_outputs=await asyncio.to_thread(structure.checked))
        if not params.bad_words:
            return params
        return await off_loop(expand, sum(map(len, params.bad_words)), params, self._encode_word)

    def _encode_word(self, word: str) -> list[int]:
        return self._tokenizer.encode(word, add_special_tokens=False)

    def _scorers(self, jobs: Sequence[Job], num_top: int | None, begins_with_added: bool) -> list[PromptScorer]:
        """One for each job; none if no scores are to be shown."""
        if num_top is None:
            return []
        return [PromptScorer(self._prompt_texts, job.prompt_ids, num_top, begins_with_added) for job in jobs]

    @cached_property
    def _adds_bos(self) -> bool:
        return self._tokenizer.encode("") == [self._tokenizer.bos_token_id]

    def _echoes(self, request: CompletionRequest) -> list[str]:
        """The text of each prompt as it was given, or nothing if no echo was asked for."""
        if not request.echo:
            return [""] * len(request.prompt)
        return [p if isinstance(p, str) else self._tokenizer.decode(p, False) for p in request.prompt]


def _drawn_seed() -> int:
    """Drawn here and not in the engine, so that the request could go on elsewhere with the same randomness."""
    return secrets.randbits(63)


def _jobs(
    name: str,
    request: GenerationRequest,
    prompts: Sequence[list[int]],
    each: Sequence[SamplingParams],
    lora: LoRARequest | None,
    text_offsets: Sequence[int] | None = None,
    scores_end: bool = False,
) -> list[Job]:
    """For each prompt, one job for each of its outputs, in order."""
    single = len(prompts) * len(each) == 1
    return [
        Job(
            index := at * len(each) + child,
            name if single else f"{name}-{index}",
            prompt_ids,
            params,
            cache_salt=request.cache_salt,
            priority=request.urgency,
            is_batch=request.is_batch,
            text_offset=text_offsets[at] if text_offsets else 0,
            return_token_ids=bool(request.return_token_ids),
            counts_prompt=child == 0,
            scores_end=scores_end,
            lora=lora,
        )
        for at, prompt_ids in enumerate(prompts)
        for child, params in enumerate(each)
    ]
