"""Runs a model on one device: inputs, forward, sampling. Launches a step and collects its tokens."""

import logging
import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from tqdm import tqdm

from engine.block_copies import HostBlocks, block_bytes
from engine.compilation import CompiledForward
from engine.config import DEFAULT_MAX_NUM_BATCHED_TOKENS, DEFAULT_MAX_NUM_SEQS, EngineConfig
from engine.errors import ConfigError
from engine.graph_runner import GraphRunner
from engine.loader import load_weights, random_weights
from engine.lora.adapter import read_adapter
from engine.lora.cache import AdapterCache
from engine.lora.layers import ModelAdapters
from engine.memory import GIB, GpuMemory, num_kv_blocks, out_of_memory
from engine.model_config import load_model_config
from engine.models.decoder import Decoder
from engine.padded_step import PaddedStep, is_decode, padded_sizes
from engine.parallel import ParallelGroup
from engine.pinned import Download, HostResults, PinnedUpload, Results
from engine.precision import choose_device, choose_precision
from engine.runner import RunnerInfo, SwapInfo
from engine.sampler import PROMPT_ROWS, sample, score_prompt
from engine.shared_sampling import follower_plan, sample_together, score_together
from engine.step import Logprobs, SamplingMode, StepAdapters, StepPlan, StepResult
from engine.step_inputs import DeviceRows, SampleInputs
from engine.trial import measure_memory, seconds_per_token, trial_plan, warm_up_plans
from kernels.attention import AttentionBackend, select_backend

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ticket:
    """A launched step's results: the tokens' ids, then what of log probabilities it has, on their way to the host."""

    results: Any
    has_logprobs: bool = False
    has_scores: bool = False


class ModelRunner:
    """A `Runner` for one device. Block tables and sampling parameters stay there in rows; a plan sends differences.

    Of a model that ranks share, every rank runs the same plans. The results of rank 0 are the step's; the others have
    its tokens, but no log probabilities.

    adapters: what the model's layers add to their weights, if it takes adapters.
    cuda: `torch.cuda` or a stand-in for it, through which copies run beside the host; None: the device is the host.
    """

    def __init__(
        self,
        model: Decoder,
        backend: AttentionBackend,
        info: RunnerInfo,
        *,
        dtype: torch.dtype,
        device: torch.device,
        cuda: Any = None,
        adapters: ModelAdapters | None = None,
    ) -> None:
        self.info = info
        self.adapters = adapters
        self.adapter_cache: AdapterCache | None = None
        self.model = model
        self.group = model.group
        self._follows = self.group is not None and self.group.rank > 0
        self.device = device
        self.dtype = dtype
        self._cuda = cuda
        config, num_kv_heads = model.config, model.shares.kv_heads.size
        try:
            self.caches = [
                backend.kv_cache(info.num_blocks, info.block_size, num_kv_heads, config.head_dim, dtype, device)
                for _ in range(config.num_layers)
            ]
        except (OSError, RuntimeError, OverflowError) as error:
            raise ConfigError(
                f"a KV cache of {info.num_blocks} blocks of {info.block_size} tokens cannot be allocated: lower "
                "kv_cache_memory_bytes or num_gpu_blocks_override"
            ) from error
        self.rows = DeviceRows(info, device, torch.from_numpy if cuda is None else PinnedUpload(device, cuda))
        self._results: Results = HostResults() if cuda is None else Download(cuda)
        self.host_blocks: HostBlocks | None = None
        self.padded: PaddedStep | None = None
        self.graphs: GraphRunner | None = None
        # No more than sampling takes at its widest, which memory has been set aside for.
        self._prompt_rows = min(PROMPT_ROWS, max(info.max_num_seqs, 16))

    @torch.inference_mode()
    def pad_decodes(self, *, capture: bool) -> None:
        """Run decode steps on static buffers from now on; capture: as CUDA graphs, which are made here."""
        self.padded = PaddedStep(
            self.model, self.caches, self.rows, self.info, dtype=self.dtype, device=self.device, cuda=self._cuda
        )
        if capture:
            self.graphs = GraphRunner(self.padded, self._cuda)

    @classmethod
    def from_config(cls, config: EngineConfig, path: Path, group: ParallelGroup | None = None) -> Self:
        """Choose what the settings leave open, load the weights of `path`, allocate the KV cache.

        group: of the `tensor_parallel_size` ranks, if that is above 1; this one loads its share of the weights. All
            ranks must be given the same settings, and may be given their own num_threads. `close` closes the group.
        Raises `ConfigError`, `LoadError`, `RankLostError`.
        """
        size = 1 if group is None else group.size
        if config.tensor_parallel_size != size:
            raise ConfigError(f"tensor_parallel_size is {config.tensor_parallel_size}, but {size} rank runs this model")
        model_config = load_model_config(path)
        device = choose_device(config)
        precision = choose_precision(config, model_config, device)
        dtype = precision.dtype
        if device.type == "cpu":
            cores = len(os.sched_getaffinity(0))
            torch.set_num_threads(config.num_threads or max(1, cores // (1 if group is None else group.local_size)))
        if config.compilation and device.type == "cpu":
            raise ConfigError("compilation is for a GPU: on a CPU the C++ kernels are faster")
        if config.compilation and group is not None:
            raise ConfigError("compilation is for a model on one GPU: leave it off, or tensor_parallel_size at 1")
        if config.compilation and config.enable_lora:
            raise ConfigError("compilation and enable_lora cannot be had together: set one of them")
        max_model_len = config.max_model_len or model_config.max_position_embeddings
        if max_model_len > model_config.max_position_embeddings:
            raise ConfigError(
                f"max_model_len is {max_model_len}, but the model has positions for "
                f"{model_config.max_position_embeddings} tokens"
            )
        try:
            backend = select_backend(device, dtype, model_config.head_dim, config.block_size, precision.kv_dtype)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        block_size = config.block_size or backend.default_block_size
        try:
            model = Decoder(
                model_config,
                backend,
                max_positions=max_model_len,
                dtype=dtype,
                device=device,
                quantization=precision.quantization,
                group=group,
            )
        except torch.OutOfMemoryError as error:
            change = "choose a smaller model, or one whose weights are stored in fewer bits"
            raise out_of_memory(f"the weights of {path.name} do", change, device) from error
        if config.load_format == "dummy":
            random_weights(model.targets(), config.seed)
        else:
            load_weights(model.targets(), path, model_config)
        adapters = None
        if config.enable_lora:
            adapters = ModelAdapters(model, config.max_loras, config.max_lora_rank, dtype=dtype, device=device)
        max_num_seqs = config.max_num_seqs or DEFAULT_MAX_NUM_SEQS[device.type]
        budget = config.max_num_batched_tokens or DEFAULT_MAX_NUM_BATCHED_TOKENS[device.type]
        layer_bytes = backend.kv_token_bytes(model.shares.kv_heads.size, model_config.head_dim, dtype)
        token_bytes = model_config.num_layers * layer_bytes
        info = RunnerInfo(
            num_blocks=1,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
            vocab_size=model_config.vocab_size,
            eos_token_ids=model_config.eos_token_ids,
            device=str(device),
            dtype=str(precision),
            max_loras=config.max_loras if config.enable_lora else 0,
        )
        cuda = torch.cuda if device.type == "cuda" else None
        # What looks at the device cannot be captured: torch's attention at lengths, and experts without a kernel of
        # their own at what was routed to them.
        looks = backend.name == "torch" or any(layer.mlp.waits for layer in model.layers)
        capture = cuda is not None and not config.enforce_eager and not looks and group is None
        if cuda is not None and looks and not config.enforce_eager:
            logger.warning(
                "no CUDA graphs: attention or experts of this model wait for the GPU here; decode steps are slow"
            )
        elif cuda is not None and group is not None and group.rank == 0 and not config.enforce_eager:
            logger.warning("no CUDA graphs: sampling on one of several ranks is not captured; decode steps are slow")
        # Where prompts are computed whole, a step may have the longest one beside every decode.
        most = budget if config.enable_chunked_prefill else max(budget, max_model_len + max_num_seqs)
        largest = replace(info, max_num_batched_tokens=most)
        gpu = None if cuda is None else cls._measure(model, backend, largest, adapters, dtype=dtype, device=device)
        num_graphs = len(padded_sizes(max_num_seqs)) * (1 + len(SamplingMode)) if capture else 0
        num_blocks = num_kv_blocks(
            config, gpu, num_graphs, token_bytes * block_size, 1 if group is None else group.local_size
        )
        if group is not None:
            num_blocks = group.min(num_blocks)
        info = replace(info, num_blocks=num_blocks)
        logger.info(
            "%s on %s in %s, attention by %s (%s), KV cache of %d tokens in %d blocks (%.2f GiB)",
            path.name,
            device,
            precision,
            backend.name,
            backend.reason,
            num_blocks * block_size,
            num_blocks,
            num_blocks * block_size * token_bytes / GIB,
        )
        runner = cls(model, backend, info, dtype=dtype, device=device, cuda=cuda, adapters=adapters)
        if adapters is not None:
            read = partial(
                read_adapter,
                targets=adapters.targets,
                config=model_config,
                max_rank=config.max_lora_rank,
                dtype=dtype,
            )
            runner.adapter_cache = AdapterCache(read, config.max_cpu_loras or config.max_loras)
        if config.compilation:
            runner.compile_forward()
        if config.swap_space:
            runner.add_swap_space(int(config.swap_space * GIB))
        if capture:
            runner.pad_decodes(capture=True)
        if cuda is not None:
            runner.warm_up()
        return runner

    @classmethod
    def _measure(
        cls,
        model: Decoder,
        backend: AttentionBackend,
        info: RunnerInfo,
        adapters: ModelAdapters | None,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> GpuMemory:
        """What steps take, with a cache of one block."""
        trial = cls(model, backend, info, dtype=dtype, device=device, cuda=torch.cuda, adapters=adapters)
        try:
            return measure_memory(trial, info, device)
        except torch.OutOfMemoryError as error:
            what = f"weights and a step of {info.max_num_batched_tokens} tokens for {info.max_num_seqs} sequences do"
            raise out_of_memory(what, "lower max_num_batched_tokens or max_num_seqs", device) from error

    def compile_forward(self, backend: str = "inductor") -> None:
        """Run the forward as torch.compile makes it from now on; all compiling is done here."""
        # In the place of the method, so that padded steps and graphs run it too.
        self.model.forward = CompiledForward(self.model, backend)  # type: ignore[method-assign]
        # A graph for any number of tokens comes from the first; one token and two show what is special about one.
        for num_tokens in tqdm((min(self.info.max_num_batched_tokens, 64), 2, 1), desc="compiling", unit="shape"):
            self.launch(trial_plan(self.info, num_tokens))

    def warm_up(self) -> None:
        """Run a step of each kind, so that no request waits while a kernel is compiled."""
        for plan in tqdm(list(warm_up_plans(self.info)), desc="warming up", unit="step"):
            self.collect(self.launch(plan))

    @torch.inference_mode()
    def add_swap_space(self, num_bytes: int) -> None:
        """Take host memory for preempted requests' blocks, and measure what a copy and what computing again costs.

        Raises `ConfigError` when it holds no block or cannot be pinned.
        """
        info, size = self.info, block_bytes(self.caches)
        num_blocks = num_bytes // size
        if num_blocks < 1:
            raise ConfigError(
                f"swap_space holds no block: it is {num_bytes / GIB:.4f} GiB, and one block takes {size / GIB:.4f}"
            )
        self.host_blocks = HostBlocks(self.caches, num_blocks, self.rows.upload, self._cuda)
        most = info.max_num_batched_tokens if self._cuda is not None else min(info.max_num_batched_tokens, 64)
        self.launch(trial_plan(info, most))  # warms up
        swap = SwapInfo(
            num_blocks=num_blocks,
            block_bytes=size,
            seconds_per_block=self.host_blocks.seconds_per_block(min(num_blocks, 16)),
            seconds_per_token=seconds_per_token(self, info, most),
        )
        self.info = replace(info, swap=swap)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Ticket:
        """Start a step; the ticket holds its results on the device."""
        if self._follows:
            plan = follower_plan(plan)
        try:
            if plan.copies is not None:
                assert self.host_blocks is not None
                self.host_blocks.copy(plan.copies)
            if plan.adapters is not None:
                return self._launch_adapted(plan, plan.adapters)
            if self.padded is not None and is_decode(plan):
                return self._launch_decode(plan, self.padded)
            return self._launch(plan)
        except torch.OutOfMemoryError:
            if self._cuda is not None:
                self._cuda.empty_cache()  # what lies about in pieces may be what the next step lacks
            raise

    def _launch(self, plan: StepPlan) -> Ticket:
        inputs = self.rows.inputs(plan)
        hidden = self.model.forward(inputs.token_ids, inputs.positions, self.caches, inputs.metadata)
        return self._sample(plan, hidden, inputs.sample_at, inputs.sampling)

    def _launch_adapted(self, plan: StepPlan, adapters: StepAdapters) -> Ticket:
        assert self.adapters is not None
        self.adapters.begin(plan, adapters, self.rows.upload)
        try:
            return self._launch(plan)
        finally:
            self.adapters.end()

    def _launch_decode(self, plan: StepPlan, padded: PaddedStep) -> Ticket:
        size = padded.fill(plan)
        run = self.graphs or padded
        run.forward(size)
        if plan.extras is None and plan.forbidden is None:
            self._results.before_overwrite()
            run.sample(size, plan.mode)
            return Ticket(self._results.start([padded.tokens[: len(plan.rows)]]))
        # What only some rows need is of another shape in each step.
        return self._sample(plan, padded.hidden[: len(plan.rows)], None, padded.sample_inputs(plan))

    def _sample(self, plan: StepPlan, hidden: Tensor, sample_at: Tensor | None, sampling: SampleInputs) -> Ticket:
        """hidden: [T, hidden]; sample_at: the K among them that are sampled from, None for all."""
        scores = None
        if sampling.extras is not None and sampling.extras.prompt_scores is not None:
            to_score, num_rows = sampling.extras.prompt_scores, self._prompt_rows
            if self.group is None:
                scores = score_prompt(self.model.logits, hidden, to_score, num_rows)
            else:
                scores = score_together(self.model, hidden, to_score, num_rows)
        results: list[Tensor] = []
        logprobs = None
        if len(plan.sample):
            if sample_at is not None and len(sample_at) < len(hidden):
                # Not hidden[sample_at]: on a CPU that wakes torch's own threads, which takes milliseconds.
                hidden = hidden.index_select(0, sample_at)
            logits = self.model.logits(hidden)
            if self.group is None:
                tokens, logprobs = sample(logits, sampling, self.rows, plan.mode)
            else:
                tokens, logprobs = sample_together(self.group, logits, sampling, self.rows, plan.mode)
            self.rows.last_tokens[sampling.rows] = tokens
            results.append(tokens)
        else:  # chunks of prompts only
            results.append(torch.empty(0, dtype=torch.int64, device=self.device))
        for found in (logprobs, scores):
            if found is not None:
                results += (found.token_ids, found.logprobs, found.ranks)
        return Ticket(self._results.start(results), logprobs is not None, scores is not None)

    def collect(self, ticket: Ticket) -> StepResult:
        tokens, *rest = self._results.finish(ticket.results)
        logprobs = Logprobs(*rest[:3]) if ticket.has_logprobs else None
        return StepResult(tokens, logprobs, Logprobs(*rest[-3:]) if ticket.has_scores else None)

    def close(self) -> None:
        if self.graphs is not None:
            self.graphs.close()
        if self.host_blocks is not None:
            self.host_blocks.close()
        self.graphs = self.padded = self.host_blocks = self.adapters = None
        self.caches = []
        self.__dict__.pop("model", None)
        if self.group is not None:
            self.group.close()
