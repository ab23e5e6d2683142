"""Runs a model on one device: inputs, forward, sampling. Launches a step and collects its tokens."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from engine.device.block_copies import HostBlocks, block_bytes
from engine.device.compilation import CompiledForward
from engine.device.graph_runner import GraphRunner
from engine.device.memory import GIB
from engine.device.padded_step import PaddedStep, is_decode
from engine.device.pinned import Download, HostResults, PinnedUpload, Results
from engine.device.step_inputs import DeviceRows, SampleInputs
from engine.device.trial import seconds_per_token, trial_plan, warm_up_plans
from engine.errors import ConfigError
from engine.lora.layers import ModelAdapters
from engine.models.decoder import Decoder
from engine.parallel.sampling import follower_plan, sample_together, score_together
from engine.runner import RunnerInfo, SwapInfo
from engine.sampler import PROMPT_ROWS, sample, score_prompt
from engine.step import Logprobs, StepAdapters, StepPlan, StepResult
from kernels.attention import AttentionBackend


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
        self.model = model
        self.group = model.group
        self._follows = self.group is not None and self.group.rank > 0
        self.device = device
        self.dtype = dtype
        self._cuda = cuda
        # Whether the last layer leaves out tokens that nobody asks for: a GPU's kernels take no step without any.
        self._cuts = cuda is None
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

    def compile_forward(self, backend: str = "inductor") -> None:
        """Run the forward as torch.compile makes it from now on; all compiling is done here."""
        # In the place of the method, so that padded steps and graphs run it too.
        self._cuts = False
        self.model.forward = CompiledForward(self.model, backend)  # type: ignore[method-assign, assignment]
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
        step = (inputs.token_ids, inputs.positions, self.caches, inputs.metadata)
        extras = inputs.sampling.extras
        scores = extras is not None and extras.prompt_scores is not None
        if self._cuts and len(inputs.sample_at) < len(inputs.token_ids) and plan.adapters is None and not scores:
            return self._sample(plan, self.model.forward(*step, inputs.sample_at), None, inputs.sampling)
        return self._sample(plan, self.model.forward(*step), inputs.sample_at, inputs.sampling)

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

    def leave(self) -> bool:
        """See `engine.runner.RankRunner`."""
        assert self.group is not None
        return self.group.leave()

    def meet_again(self, word: str) -> list[str]:
        """See `engine.runner.RankRunner`."""
        assert self.group is not None
        return self.group.meet_again(word)

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
