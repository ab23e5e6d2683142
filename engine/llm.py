"""The offline door: text in, text out, in one process."""

import itertools
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from tqdm import tqdm

from engine.bad_words import expand
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import EngineDeadError
from engine.hf.generation_config import default_sampling
from engine.lora.request import LoRARequest
from engine.offline.completion import Completion, CompletionOutput, Logprob, PromptJob, RequestOutput
from engine.offline.interrupts import interrupted_between_steps
from engine.offline.prompts import Message, Prompt, listed, listed_chats, naming, one_each, read_prompt, turns
from engine.outputs import StepOutput
from engine.sampling_params import SamplingParams, children
from engine.text.token_text import TokenTexts
from engine.text.tokenizer import Tokenizer, load_tokenizer

__all__ = ["LLM", "CompletionOutput", "Logprob", "Message", "Prompt", "RequestOutput"]


class LLM:
    """A model and its engine, for batches of prompts. Calls from several threads take turns.

    settings: fields of `EngineConfig`, with `model` an alias, a folder, a `.gguf` file or a Hub repository id.
    Raises `ConfigError` for what cannot be.
    """

    def __init__(self, model: str | Path | None = None, **settings: Any) -> None:
        if model is not None:
            settings["model"] = str(model)
        config = EngineConfig.from_kwargs(**settings)
        self.engine = Engine.from_config(config)
        assert self.engine.info.model_path is not None
        self.tokenizer = load_tokenizer(self.engine.info.model_path, config.trust_remote_code)
        self._default_params = SamplingParams(**default_sampling(self.engine.info.model_path, config.generation_config))
        self._token_texts = TokenTexts(self.tokenizer)
        self._ids = itertools.count()
        self._turn = threading.RLock()
        self._closed = False

    @classmethod
    def from_engine(cls, engine: Engine, tokenizer: Tokenizer) -> Self:
        """An `LLM` over an engine that is there; `close` closes it."""
        llm = cls.__new__(cls)
        llm.engine, llm.tokenizer, llm._ids, llm._closed = engine, tokenizer, itertools.count(), False
        llm._default_params = SamplingParams()
        llm._token_texts = TokenTexts(tokenizer)
        llm._turn = threading.RLock()
        return llm

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Complete the prompts; the results are in their order.

        sampling_params: one for all prompts, or one for each; None samples as the model's makers say.
        lora_request: the adapter of all prompts, or one for each, None for the model as it is.
        Raises `InvalidRequestError`, which names the prompt by its index, before anything has started; a prompt that
        is too long is a `ContextLengthError`. An interrupt or a fault on the way ends all requests of this call.
        """
        jobs = []
        for index, prompt in enumerate(listed(prompts)):
            with naming(f"prompts[{index}]"):
                jobs.append(read_prompt(prompt, self.tokenizer))
        with self._turn:
            return self._run("prompts", jobs, sampling_params, use_tqdm, lora_request)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Answer one chat or a list of chats, formatted by the model's template; otherwise as `generate`.

        `prompt` in the results is the formatted chat.
        """
        jobs = []
        for index, chat in enumerate(listed_chats(messages)):
            with naming(f"messages[{index}]"):
                ids = self.tokenizer.apply_chat_template(
                    turns(chat),
                    tools=tools,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    **(chat_template_kwargs or {}),
                )
            jobs.append((self.tokenizer.decode(ids, skip_special_tokens=False), ids))
        with self._turn:
            return self._run("messages", jobs, sampling_params, use_tqdm, lora_request)

    def close(self) -> None:
        """Free the model's memory; idempotent. Prompts after it raise `EngineDeadError`."""
        with self._turn:
            self._closed = True
            self.engine.close()

    def _run(
        self,
        name: str,
        jobs: Sequence[tuple[str | None, list[int]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None,
    ) -> list[RequestOutput]:
        if self._closed:
            raise EngineDeadError("this LLM has been closed: make a new one")
        prompts = []
        params = self._default_params if sampling_params is None else sampling_params
        each_params = one_each("sampling_params", params, SamplingParams, len(jobs))
        each_lora: list[LoRARequest | None] = [None] * len(jobs)
        if lora_request is not None:
            each_lora = one_each("lora_request", lora_request, LoRARequest | None, len(jobs))
        for index, ((text, ids), param, lora) in enumerate(zip(jobs, each_params, each_lora, strict=True)):
            with naming(f"{name}[{index}]"):
                prompts.append(self._prepare(text, ids, param, lora))
        running: dict[str, tuple[PromptJob, Completion]] = {}
        with _Progress(len(prompts), use_tqdm) as progress, interrupted_between_steps() as raise_if_interrupted:
            try:
                for prompt in prompts:
                    for completion in prompt.completions:
                        running[completion.request_id] = prompt, completion
                        self.engine.add_request(
                            completion.request_id, prompt.prompt_ids, completion.params, adapter=prompt.adapter
                        )
                while self.engine.has_work():
                    for prompt in self._commit(self.engine.step(), running):
                        progress.add(len(prompt.prompt_ids), sum(len(c.token_ids) for c in prompt.completions))
                    raise_if_interrupted()
            finally:
                for request_id in running:
                    self.engine.abort(request_id)
                self.engine.drain()
        return [prompt.result(self._token_texts) for prompt in prompts]

    def _prepare(self, text: str | None, ids: list[int], params: SamplingParams, lora: LoRARequest | None) -> PromptJob:
        """A prompt and its n sequences. Raises `InvalidRequestError` for what could never run."""
        params = expand(params, lambda word: self.tokenizer.encode(word, add_special_tokens=False))
        each = children(params)
        self.engine.check(ids, each[0])
        adapter = None if lora is None else self.engine.load_adapter(lora)
        name = str(next(self._ids))
        names = [name] if len(each) == 1 else [f"{name}-{i}" for i in range(len(each))]
        completions = [Completion(names[i], i, child, self.tokenizer) for i, child in enumerate(each)]
        return PromptJob(name, text, ids, completions, adapter)

    def _commit(self, output: StepOutput, running: dict[str, tuple[PromptJob, Completion]]) -> list[PromptJob]:
        """Give a step's tokens to their sequences, and take those that ended out of `running`; returns the prompts that
        are done."""
        ends = {end.request_id: end for end in output.finished}
        for request_id, entries in output.prompt_logprobs.items():
            if request_id in running:
                running[request_id][1].prompt_logprobs = entries
        tokens: dict[str, list[int]] = {}
        for request_id, token_id in zip(output.request_ids, output.token_ids, strict=True):
            tokens.setdefault(request_id, []).append(token_id)
        for request_id, token_ids in tokens.items():
            if request_id not in running:
                continue
            completion = running[request_id][1]
            stopped = completion.push(token_ids, output.logprobs.get(request_id, ()), ends.get(request_id))
            if stopped and request_id not in ends:
                end = self.engine.abort(request_id)
                assert end is not None
                ends[request_id] = end
        done = []
        for request_id, end in ends.items():
            if request_id in running:
                prompt, completion = running.pop(request_id)
                completion.end(end)
                if prompt.finished:
                    done.append(prompt)
        return done


class _Progress:
    """A bar of finished requests, with tokens per second of the prompts and outputs of those."""

    def __init__(self, total: int, shown: bool) -> None:
        self._bar = tqdm(total=total, desc="Requests", dynamic_ncols=True, disable=not shown)
        self._input = self._output = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.close()

    def add(self, num_prompt: int, num_output: int) -> None:
        self._input += num_prompt
        self._output += num_output
        if not self._bar.disable:
            seconds = max(self._bar.format_dict["elapsed"], 1e-9)
            rates = f"input {self._input / seconds:.1f} tok/s, output {self._output / seconds:.1f} tok/s"
            self._bar.set_postfix_str(rates, refresh=False)
        self._bar.update(1)
