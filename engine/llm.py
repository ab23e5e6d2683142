"""The offline door: text in, text out, in one process."""

import itertools
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Self

from tqdm import tqdm

from engine.bad_words import expand
from engine.completion import Completion, CompletionOutput, Logprob, PromptJob, RequestOutput
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import EngineDeadError, InvalidRequestError
from engine.generation_config import default_sampling
from engine.lora.request import LoRARequest
from engine.outputs import StepOutput
from engine.sampling_params import SamplingParams, children
from engine.token_text import TokenTexts
from engine.tokenizer import Tokenizer, load_tokenizer

__all__ = ["LLM", "CompletionOutput", "Logprob", "Message", "Prompt", "RequestOutput"]

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or vLLM's `{"prompt": text}` and `{"prompt_token_ids": ids}`."""

Message = Mapping[str, Any]


class LLM:
    """A model and its engine, for batches of prompts. Not thread-safe.

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
        self._closed = False

    @classmethod
    def from_engine(cls, engine: Engine, tokenizer: Tokenizer) -> Self:
        """An `LLM` over an engine that is there; `close` closes it."""
        llm = cls.__new__(cls)
        llm.engine, llm.tokenizer, llm._ids, llm._closed = engine, tokenizer, itertools.count(), False
        llm._default_params = SamplingParams()
        llm._token_texts = TokenTexts(tokenizer)
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
        Raises
        `InvalidRequestError`, which names the prompt by its index, before anything has started; a prompt that is
        too long is a `ContextLengthError`. An interrupt or a fault on the way ends all requests of this call.
        """
        jobs = []
        for index, prompt in enumerate(_listed(prompts)):
            with _naming(f"prompts[{index}]"):
                jobs.append(self._read(prompt))
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
        for index, chat in enumerate(_listed_chats(messages)):
            with _naming(f"messages[{index}]"):
                ids = self.tokenizer.apply_chat_template(
                    _turns(chat),
                    tools=tools,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    **(chat_template_kwargs or {}),
                )
            jobs.append((self.tokenizer.decode(ids, skip_special_tokens=False), ids))
        return self._run("messages", jobs, sampling_params, use_tqdm, lora_request)

    def close(self) -> None:
        """Free the model's memory; idempotent. Prompts after it raise `EngineDeadError`."""
        self._closed = True
        self.engine.close()

    def _read(self, prompt: Any) -> tuple[str | None, list[int]]:
        """Text, if there is any, and token ids of a prompt in one of its forms."""
        text, ids = None, prompt
        if isinstance(prompt, Mapping):
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        elif isinstance(prompt, str):
            text, ids = prompt, None
        if ids is None and isinstance(text, str):
            ids = self.tokenizer.encode(text)
        if not isinstance(ids, Sequence) or isinstance(ids, str | bytes):
            raise InvalidRequestError(
                "a prompt is a string, a list of token ids, or a dict with prompt or prompt_token_ids, "
                f"not {type(prompt).__name__}.",
                "prompt",
            )
        return text, list(ids)

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
        each_params = _one_each("sampling_params", params, SamplingParams, len(jobs))
        each_lora: list[LoRARequest | None] = [None] * len(jobs)
        if lora_request is not None:
            each_lora = _one_each("lora_request", lora_request, LoRARequest | None, len(jobs))
        for index, ((text, ids), param, lora) in enumerate(zip(jobs, each_params, each_lora, strict=True)):
            with _naming(f"{name}[{index}]"):
                prompts.append(self._prepare(text, ids, param, lora))
        running: dict[str, tuple[PromptJob, Completion]] = {}
        with _Progress(len(prompts), use_tqdm) as progress, _interrupted_between_steps() as raise_if_interrupted:
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


def _listed(prompts: Any) -> Sequence[Any]:
    """The prompts as a list, where one came alone."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise InvalidRequestError(f"prompts is a prompt or a list of prompts, not {type(prompts).__name__}.", "prompt")
    return [prompts] if prompts and isinstance(prompts[0], int) else prompts


def _listed_chats(messages: Any) -> Sequence[Any]:
    """The chats as a list, where one came alone."""
    if not isinstance(messages, Sequence):
        raise InvalidRequestError(
            f"messages is a list of messages or a list of such lists, not {type(messages).__name__}.", "messages"
        )
    return [messages] if messages and isinstance(messages[0], Mapping) else messages


def _turns(chat: Any) -> list[dict[str, Any]]:
    if not isinstance(chat, Sequence) or not chat or not all(isinstance(message, Mapping) for message in chat):
        raise InvalidRequestError(
            "a chat is a list of messages, at least one, each of them a dict with role and content.", "messages"
        )
    return [dict(message) for message in chat]


def _one_each(name: str, given: Any, kind: Any, count: int) -> list[Any]:
    """A value of a kind for each prompt, where one is given for all or a list of them."""
    if isinstance(given, kind):
        return [given] * count
    if not isinstance(given, Sequence) or not all(isinstance(one, kind) for one in given):
        wanted = "SamplingParams" if kind is SamplingParams else "LoRARequest"
        raise InvalidRequestError(f"{name} takes {wanted}, one or a list of them, not {type(given).__name__}.", name)
    if len(given) != count:
        raise InvalidRequestError(
            f"{name} has {len(given)} entries for {count} prompts: give one for all, or one for each.", name
        )
    return list(given)


@contextmanager
def _naming(what: str) -> Iterator[None]:
    """Put `what` before the message of an `InvalidRequestError`, which stays of its kind."""
    try:
        yield
    except InvalidRequestError as error:
        error.args = (f"{what}: {error}",)
        raise


@contextmanager
def _interrupted_between_steps() -> Iterator[Callable[[], None]]:
    """Hold back Ctrl-C until the function given is called; in the midst of a step it would leave half a step done.

    A second Ctrl-C is not held back. Elsewhere than in the main thread, or where somebody else handles the signal,
    nothing changes.
    """
    pressed = False

    def note(signum: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    def raise_if_pressed() -> None:
        if pressed:
            raise KeyboardInterrupt

    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield raise_if_pressed
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield raise_if_pressed
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
