"""The engine: schedule a step, launch it, collect an earlier one, commit its tokens. One thread calls it."""

import logging
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from engine.config import EngineConfig
from engine.errors import EngineDeadError, InvalidRequestError
from engine.lora.request import LoRARequest
from engine.model_config import load_model_config
from engine.outputs import EngineStats, Finished, StepOutput
from engine.parallel.heads import check_heads
from engine.parallel.start import StartShards, start_installed_shards
from engine.request import Request
from engine.request_rules import RequestRules
from engine.runner import Runner
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from engine.step import StepPlan
from engine.structured.grammar import Grammar, GrammarCompiler
from engine.structured.vocabulary import Vocabulary, grammar_vocabulary

if TYPE_CHECKING:
    from engine.lora.adapter import Adapter
    from engine.lora.cache import AdapterCache

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3
"""Failed steps in a row after which the engine gives up: the fault is not the requests'."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a client of the engine must know. max_total_tokens: prompt plus output of one request."""

    model_path: Path | None
    max_total_tokens: int
    max_num_seqs: int
    block_size: int
    num_blocks: int
    vocab_size: int
    device: str
    dtype: str


class Engine:
    """async_scheduling: launch each step before the one before it is collected, so that the device never waits for the
    host; tokens are read one step late, and a request that has stopped meanwhile loses its extra one.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        model_path: Path | None = None,
        enable_chunked_prefill: bool = True,
        enable_prefix_caching: bool = True,
        async_scheduling: bool = False,
        read_vocabulary: Callable[[], Vocabulary] | None = None,
        adapters: "AdapterCache | None" = None,
    ) -> None:
        self.runner = runner
        self._grammars = None if read_vocabulary is None else GrammarCompiler(read_vocabulary)
        self._adapters = adapters
        self._depth = 2 if async_scheduling else 1
        self._launched: deque[tuple[StepPlan, Any]] = deque()  # with their tickets, or what went wrong in the launch
        info = runner.info
        # A sequence longer than the whole pool could never finish, however long it waited.
        longest = min(info.max_model_len, info.num_blocks * info.block_size)
        if longest < info.max_model_len:
            logger.warning(
                "the KV cache holds %d tokens, so a request may have %d tokens instead of max_model_len %d; "
                "more memory (kv_cache_memory_bytes, gpu_memory_utilization) raises it",
                info.num_blocks * info.block_size,
                longest,
                info.max_model_len,
            )
        budget = info.max_num_batched_tokens
        if not enable_chunked_prefill:
            # A whole prompt must fit a step beside every running decode.
            budget = max(budget, longest + info.max_num_seqs)
        self.scheduler = Scheduler(
            num_blocks=info.num_blocks,
            block_size=info.block_size,
            max_num_seqs=info.max_num_seqs,
            max_num_batched_tokens=budget,
            max_total_tokens=longest,
            enable_chunked_prefill=enable_chunked_prefill,
            enable_prefix_caching=enable_prefix_caching,
            swap=info.swap,
            max_loras=info.max_loras,
        )
        self.info = EngineInfo(
            model_path=model_path,
            max_total_tokens=longest,
            max_num_seqs=self.scheduler.max_num_seqs,
            block_size=info.block_size,
            num_blocks=info.num_blocks,
            vocab_size=info.vocab_size,
            device=info.device,
            dtype=info.dtype,
        )
        self._rules = RequestRules(
            longest, info.vocab_size, info.eos_token_ids, has_grammars=self._grammars is not None
        )
        self._steps = 0
        self._failed_steps = 0

    @classmethod
    def from_config(cls, config: EngineConfig, start_shards: StartShards = start_installed_shards) -> Self:
        """Load the model that `config` names. Raises `ConfigError` for what cannot be.

        start_shards: makes the runner where tensor_parallel_size is above 1.
        """
        from engine.hub import resolve_model
        from engine.text.tokenizer import load_tokenizer

        path = resolve_model(config.model)
        runner: Runner
        adapters = None
        if config.tensor_parallel_size > 1:
            check_heads(load_model_config(path), config.tensor_parallel_size)
            runner = start_shards(config)
        else:
            from engine.runner_setup import load_runner

            runner = load_runner(config, path)
        if runner.info.read_adapter is not None:
            from engine.lora.cache import AdapterCache

            adapters = AdapterCache(runner.info.read_adapter, config.max_cpu_loras or config.max_loras)

        def read_vocabulary() -> Vocabulary:
            return grammar_vocabulary(load_tokenizer(path, config.trust_remote_code), runner.info.vocab_size)

        asynchronous = config.async_scheduling
        return cls(
            runner,
            model_path=path,
            # On a CPU a launch returns when the step is done: nothing would overlap.
            async_scheduling=runner.info.device != "cpu" if asynchronous is None else asynchronous,
            enable_chunked_prefill=config.enable_chunked_prefill,
            enable_prefix_caching=config.enable_prefix_caching,
            read_vocabulary=read_vocabulary,
            adapters=adapters,
        )

    def check(self, prompt_ids: Sequence[int], params: SamplingParams, output_ids: Sequence[int] = ()) -> None:
        """Raise `InvalidRequestError` or `ContextLengthError` for a request that could never run. Thread-safe."""
        self._rules.check(prompt_ids, params, output_ids)

    def compile_grammar(self, params: SamplingParams) -> Future[Grammar] | None:
        """Begin to compile what `params` asks for, in another thread; None if that is nothing. Thread-safe.

        `add_request` waits for it, so who must not wait asks here first. The future raises `InvalidRequestError`.
        """
        if params.structured_outputs is None or self._grammars is None:
            return None
        return self._grammars.compile(params.structured_outputs)

    def load_adapter(self, request: LoRARequest) -> "Adapter":
        """The adapter for `add_request`, read now if it is not on the host. Thread-safe.

        Raises `AdapterError`; `InvalidRequestError` if this engine takes no adapters.
        """
        if self._adapters is None:
            raise InvalidRequestError("This engine takes no adapters: start it with enable_lora.", "lora_request")
        return self._adapters.get(request)

    def add_request(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        output_ids: Sequence[int] = (),
        *,
        priority: int = 0,
        tenant: str = "",
        is_batch: bool = False,
        block_hashes: list[bytes] | None = None,
        cache_salt: str | None = None,
        adapter: "Adapter | None" = None,
    ) -> None:
        """Queue a request.

        output_ids: tokens that it has produced elsewhere; it goes on after them as if it had produced them here. The
            prompt's log probabilities came with the first of them and are not computed again.
        priority: lower is served earlier, among the requests of one tenant.
        tenant: whose request it is; tenants get equal shares of what they compete for.
        is_batch: run it only where no other request wants to.
        block_hashes: `engine.block_hash.block_hashes` of the prompt, if the caller has them.
        adapter: of `load_adapter`; block_hashes are of that too.
        max_tokens is clamped to what the context leaves. Raises as `check` does.
        """
        self.check(prompt_ids, params, output_ids)
        if request_id in self.scheduler.requests:
            raise InvalidRequestError(f"A request with id {request_id!r} is already there.", "request_id")
        matcher = None
        if (compiling := self.compile_grammar(params)) is not None:
            matcher = compiling.result().matcher()
            if not matcher.accept_many(output_ids):
                raise InvalidRequestError("The output_ids do not fit the structured output.", "output_ids")
        self.scheduler.add(
            Request(
                request_id,
                prompt_ids,
                output_ids,
                params,
                seed=secrets.randbits(63) if params.seed is None else params.seed,
                limit=self._rules.limit(len(prompt_ids), params),
                stop_ids=self._rules.stop_ids(params),
                priority=priority,
                tenant=tenant,
                is_batch=is_batch,
                salt=cache_salt,
                matcher=matcher,
                adapter=adapter,
                hashes=None if block_hashes is None else block_hashes[: len(prompt_ids) // self.info.block_size],
            )
        )

    def abort(self, request_id: str) -> Finished | None:
        """End a request wherever it is; None if it is not there (any more).

        What it holds is free at once, or when the last step in flight that names it has been collected.
        """
        return self.scheduler.abort(request_id)

    def has_work(self) -> bool:
        return bool(self.scheduler.requests or self._launched)

    def step(self) -> StepOutput:
        """Launch the next step, if there is one, and return the tokens of the oldest one that is due.

        A step that fails ends its requests with an error and leaves the engine sound. Raises `EngineDeadError`
        after several failures in a row, when the runner is lost, or when work is there that no step can be planned for.
        """
        plan = self.scheduler.schedule()
        if plan is not None:
            self._steps += 1
            self._launched.append((plan, self._launch(plan)))
            if len(self._launched) < self._depth:
                return StepOutput()
        if self._launched:
            return self._collect()
        if self.scheduler.requests:
            raise EngineDeadError("requests wait, but no step can be planned for them")
        return StepOutput()

    def drain(self) -> None:
        """Collect what is in flight and launch nothing; for a caller that has ended all requests."""
        while self._launched:
            self._collect()

    def _let_pass(self) -> None:
        """Wait until the device has done with what is in flight, whatever comes of it."""
        while self._launched:
            _, ticket = self._launched.popleft()
            try:
                if not isinstance(ticket, Exception):
                    self.runner.collect(ticket)
            except EngineDeadError:
                raise
            except Exception:
                logger.exception("a step failed behind another")

    def _launch(self, plan: StepPlan) -> Any:
        try:
            return self.runner.launch(plan)
        except EngineDeadError:
            raise
        except Exception as error:  # told when the step's turn comes: those before it are collected first
            return error

    def _collect(self) -> StepOutput:
        plan, ticket = self._launched.popleft()
        try:
            if isinstance(ticket, Exception):
                raise ticket
            result = self.runner.collect(ticket)
        except EngineDeadError:
            raise
        except Exception as error:
            logger.exception("a step of %d sequences failed", len(plan.rows))
            self._failed_steps += 1
            self._let_pass()
            failed = self.scheduler.fail(plan, f"{type(error).__name__} in a step of the engine")
            if self._failed_steps >= MAX_FAILED_STEPS:
                raise EngineDeadError(f"{MAX_FAILED_STEPS} steps in a row failed, the last by {error!r}") from error
            return StepOutput(finished=failed)
        self._failed_steps = 0
        return self.scheduler.commit(plan, result)

    def stats(self) -> EngineStats:
        """Gauges and counters; read in the thread that steps, or between steps."""
        scheduler = self.scheduler
        blocks = scheduler.blocks
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            waiting_tokens=scheduler.waiting.num_tokens,
            queue_age_s=scheduler.waiting.longest_wait_s(),
            total_blocks=blocks.num_blocks,
            live_blocks=blocks.num_live,
            cached_blocks=blocks.num_cached,
            free_blocks=blocks.num_free,
            prompt_tokens=scheduler.intake.num_prompt_tokens,
            cached_prompt_tokens=scheduler.intake.num_cached_prompt_tokens,
            generation_tokens=scheduler.num_generated_tokens,
            preemptions=scheduler.num_preemptions,
            steps=self._steps,
            swap_out_bytes=0 if scheduler.swap is None else scheduler.swap.bytes_out,
            swap_in_bytes=0 if scheduler.swap is None else scheduler.swap.bytes_in,
            adapter_loads=scheduler.adapters.num_loads,
            slots_used=scheduler.slots_used(),
        )

    def close(self) -> None:
        """End what still runs and free the model's memory."""
        for request_id in list(self.scheduler.requests):
            self.abort(request_id)
        self._launched.clear()
        if self._grammars is not None:
            self._grammars.close()
        self.runner.close()
