"""Runs a model on one device: inputs, forward, sampling. Launches a step and collects its tokens."""

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from engine.config import DEFAULT_MAX_NUM_BATCHED_TOKENS, DEFAULT_MAX_NUM_SEQS, EngineConfig
from engine.errors import ConfigError
from engine.loader import load_weights, random_weights
from engine.memory import GIB, num_kv_blocks
from engine.model_config import ModelConfig, load_model_config
from engine.models.decoder import Decoder
from engine.precision import choose_device, choose_precision
from engine.runner import RunnerInfo
from engine.sampler import PROMPT_ROWS, sample, score_prompt
from engine.step import Logprobs, StepPlan, StepResult
from engine.step_inputs import DeviceRows
from kernels.attention import AttentionBackend, select_backend
from kernels.sampler import TokenLogprobs

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ticket:
    """A launched step's results on the device. tokens: int64 [K]."""

    tokens: Tensor
    logprobs: TokenLogprobs | None
    prompt_logprobs: TokenLogprobs | None


class ModelRunner:
    """A `Runner` for one device. Block tables and sampling parameters stay there in rows; a plan sends differences."""

    def __init__(
        self, model: Decoder, backend: AttentionBackend, info: RunnerInfo, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.info = info
        self.model = model
        self.device = device
        config = model.config
        try:
            self.caches = [
                backend.kv_cache(info.num_blocks, info.block_size, config.num_kv_heads, config.head_dim, dtype, device)
                for _ in range(config.num_layers)
            ]
        except (OSError, RuntimeError, OverflowError) as error:
            raise ConfigError(
                f"a KV cache of {info.num_blocks} blocks of {info.block_size} tokens cannot be allocated: lower "
                "kv_cache_memory_bytes or num_gpu_blocks_override"
            ) from error
        self.rows = DeviceRows(info, device)
        # No more than sampling takes at its widest, which memory has been set aside for.
        self._prompt_rows = min(PROMPT_ROWS, max(info.max_num_seqs, 16))

    @classmethod
    def from_config(cls, config: EngineConfig, path: Path) -> Self:
        """Choose what the settings leave open, load the weights of `path`, allocate the KV cache.

        Raises `ConfigError`, `LoadError`.
        """
        model_config = load_model_config(path)
        device = choose_device(config)
        precision = choose_precision(config, model_config, device)
        dtype = precision.dtype
        if device.type == "cpu":
            torch.set_num_threads(config.num_threads or len(os.sched_getaffinity(0)))
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
        model = Decoder(model_config, backend, max_positions=max_model_len, dtype=dtype, device=device)
        if config.load_format == "dummy":
            random_weights(model.targets(), config.seed)
        else:
            load_weights(model.targets(), path, model_config)
        model.pack(precision.quantization)
        max_num_seqs = config.max_num_seqs or DEFAULT_MAX_NUM_SEQS[device.type]
        budget = config.max_num_batched_tokens or DEFAULT_MAX_NUM_BATCHED_TOKENS[device.type]
        layer_bytes = backend.kv_token_bytes(model_config.num_kv_heads, model_config.head_dim, dtype)
        token_bytes = model_config.num_layers * layer_bytes
        num_blocks = num_kv_blocks(
            config,
            device,
            bytes_per_block=token_bytes * block_size,
            step_bytes=_step_bytes(model_config, budget, max_num_seqs, dtype),
            block_size=block_size,
        )
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
        info = RunnerInfo(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
            vocab_size=model_config.vocab_size,
            eos_token_ids=model_config.eos_token_ids,
            device=str(device),
            dtype=str(precision),
        )
        return cls(model, backend, info, dtype=dtype, device=device)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Ticket:
        """Start a step; the ticket holds its results on the device."""
        inputs = self.rows.inputs(plan)
        hidden = self.model.forward(inputs.token_ids, inputs.positions, self.caches, inputs.metadata)
        scores = None
        if inputs.extras is not None and inputs.extras.prompt_scores is not None:
            scores = score_prompt(self.model.logits, hidden, inputs.extras.prompt_scores, self._prompt_rows)
        if not len(plan.sample):  # chunks of prompts only
            return Ticket(torch.empty(0, dtype=torch.int64), None, scores)
        logits = self.model.logits(hidden[inputs.sample_at])
        tokens, logprobs = sample(logits, inputs, self.rows, plan.mode)
        self.rows.last_tokens[inputs.sample_rows] = tokens
        return Ticket(tokens, logprobs, scores)

    def collect(self, ticket: Ticket) -> StepResult:
        return StepResult(ticket.tokens.cpu().numpy(), _on_host(ticket.logprobs), _on_host(ticket.prompt_logprobs))

    def close(self) -> None:
        self.caches = []
        self.__dict__.pop("model", None)


def _on_host(logprobs: TokenLogprobs | None) -> Logprobs | None:
    if logprobs is None:
        return None
    return Logprobs(logprobs.token_ids.cpu().numpy(), logprobs.logprobs.cpu().numpy(), logprobs.ranks.cpu().numpy())


def _step_bytes(config: ModelConfig, num_tokens: int, num_rows: int, dtype: torch.dtype) -> int:
    """Memory of the largest step: the widest activations twice over, and logits with the sampler's copies."""
    width = 2 * config.intermediate_size + config.hidden_size * 4 + config.num_heads * config.head_dim * 2
    return 2 * num_tokens * width * dtype.itemsize + 4 * num_rows * config.vocab_size * 4
