"""How a model's runner comes up: what settings leave open is chosen, weights are loaded, memory is shared out."""

import logging
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from engine.config import DEFAULT_MAX_NUM_BATCHED_TOKENS, DEFAULT_MAX_NUM_SEQS, EngineConfig
from engine.device.memory import GIB, GpuMemory, num_kv_blocks, out_of_memory
from engine.device.padded_step import padded_sizes
from engine.device.precision import Precision, choose_device, choose_precision
from engine.device.trial import measure_memory
from engine.errors import ConfigError
from engine.loader import check_size, load_weights, random_weights
from engine.lora.adapter import read_adapter
from engine.lora.layers import ModelAdapters
from engine.model_config import ModelConfig, load_model_config
from engine.model_runner import ModelRunner
from engine.models.decoder import Decoder
from engine.parallel.group import ParallelGroup
from engine.runner import RunnerInfo
from engine.step import SamplingMode
from kernels.attention import AttentionBackend, select_backend
from kernels.heap import keep_freed_memory

logger = logging.getLogger(__name__)


def load_runner(config: EngineConfig, path: Path, group: ParallelGroup | None = None) -> ModelRunner:
    """The runner of the model in `path`, with its weights loaded and its KV cache allocated.

    group: of the `tensor_parallel_size` ranks, if that is above 1; this one loads its share of the weights. All
        ranks must be given the same settings, and may be given their own num_threads. Closing the runner closes it.
    Raises `ConfigError`, `LoadError`, `RankLostError`.
    """
    size, local_size = (1, 1) if group is None else (group.size, group.local_size)
    if config.tensor_parallel_size != size:
        raise ConfigError(f"tensor_parallel_size is {config.tensor_parallel_size}, but {size} rank runs this model")
    model_config = load_model_config(path)
    device = choose_device(config)
    precision = choose_precision(config, model_config, device)
    if device.type == "cpu":
        torch.set_num_threads(config.num_threads or max(1, len(os.sched_getaffinity(0)) // local_size))
    max_model_len = model_config.max_model_len(config.max_model_len)
    try:
        backend = select_backend(device, precision.dtype, model_config.head_dim, config.block_size, precision.kv_dtype)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    model = _load_model(config, path, model_config, backend, precision, device, max_model_len, group)
    adapters = read = None
    if config.enable_lora:
        dtype, max_rank = precision.dtype, config.max_lora_rank
        adapters = ModelAdapters(model, config.max_loras, max_rank, dtype=dtype, device=device)
        read = partial(read_adapter, targets=adapters.targets, config=model_config, max_rank=max_rank, dtype=dtype)
    info = RunnerInfo(
        num_blocks=1,
        block_size=config.block_size or backend.default_block_size,
        max_num_seqs=config.max_num_seqs or DEFAULT_MAX_NUM_SEQS[device.type],
        max_num_batched_tokens=config.max_num_batched_tokens or DEFAULT_MAX_NUM_BATCHED_TOKENS[device.type],
        max_model_len=max_model_len,
        vocab_size=model_config.vocab_size,
        eos_token_ids=model_config.eos_token_ids,
        device=str(device),
        dtype=str(precision),
        max_loras=config.max_loras if config.enable_lora else 0,
        read_adapter=read,
    )
    capture = device.type == "cuda" and _captures_graphs(config, model, backend)
    gpu = None if device.type != "cuda" else _measure(config, model, backend, info, adapters, precision.dtype, device)
    num_graphs = len(padded_sizes(info.max_num_seqs)) * (1 + len(SamplingMode)) if capture else 0
    layer_bytes = backend.kv_token_bytes(model.shares.kv_heads.size, model_config.head_dim, precision.dtype)
    token_bytes = model_config.num_layers * layer_bytes
    num_blocks = num_kv_blocks(config, gpu, num_graphs, token_bytes * info.block_size, local_size)
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
        num_blocks * info.block_size,
        num_blocks,
        num_blocks * info.block_size * token_bytes / GIB,
    )
    cuda = torch.cuda if device.type == "cuda" else None
    runner = ModelRunner(model, backend, info, dtype=precision.dtype, device=device, cuda=cuda, adapters=adapters)
    if config.compilation:
        runner.compile_forward()
    if config.swap_space:
        runner.add_swap_space(int(config.swap_space * GIB))
    if capture:
        runner.pad_decodes(capture=True)
    if cuda is None:
        keep_freed_memory()
    else:
        runner.warm_up()
    return runner


def _load_model(
    config: EngineConfig,
    path: Path,
    model_config: ModelConfig,
    backend: AttentionBackend,
    precision: Precision,
    device: torch.device,
    max_positions: int,
    group: ParallelGroup | None,
) -> Decoder:
    if config.load_format != "dummy":
        check_size(path, model_config)
    try:
        model = Decoder(
            model_config,
            backend,
            max_positions=max_positions,
            dtype=precision.dtype,
            device=device,
            quantization=precision.quantization,
            group=group,
        )
    except torch.OutOfMemoryError as error:
        change = "choose a smaller model, or one whose weights are stored in fewer bits"
        raise out_of_memory(f"the weights of {path.name} do", change, device) from error
    except RuntimeError as error:
        if device.type != "cpu" or "allocate memory" not in str(error):
            raise
        raise ConfigError(
            f"the weights of {path.name} do not fit this machine's memory: choose a smaller model"
        ) from error
    if config.load_format == "dummy":
        random_weights(model.targets(), config.seed)
    else:
        load_weights(model.targets(), path, model_config)
    return model


def _captures_graphs(config: EngineConfig, model: Decoder, backend: AttentionBackend) -> bool:
    """Whether decode steps on a GPU become CUDA graphs; says why not where that is nobody's wish."""
    if config.enforce_eager:
        return False
    # What looks at the device cannot be captured: torch's attention at lengths, and experts without a kernel of
    # their own at what was routed to them.
    if backend.name == "torch" or any(layer.mlp.waits for layer in model.layers):
        logger.warning(
            "no CUDA graphs: attention or experts of this model wait for the GPU here; decode steps are slow"
        )
        return False
    if model.group is not None:
        if model.group.rank == 0:
            logger.warning("no CUDA graphs: sampling on one of several ranks is not captured; decode steps are slow")
        return False
    return True


def _measure(
    config: EngineConfig,
    model: Decoder,
    backend: AttentionBackend,
    info: RunnerInfo,
    adapters: ModelAdapters | None,
    dtype: torch.dtype,
    device: torch.device,
) -> GpuMemory:
    """What steps take on a GPU, with a cache of one block."""
    budget = info.max_num_batched_tokens
    if not config.enable_chunked_prefill:
        # Prompts are computed whole: a step may have the longest one beside every decode.
        budget = max(budget, info.max_model_len + info.max_num_seqs)
    largest = replace(info, max_num_batched_tokens=budget)
    trial = ModelRunner(model, backend, largest, dtype=dtype, device=device, cuda=torch.cuda, adapters=adapters)
    try:
        return measure_memory(trial, largest, device)
    except torch.OutOfMemoryError as error:
        what = f"weights and a step of {budget} tokens for {info.max_num_seqs} sequences do"
        raise out_of_memory(what, "lower max_num_batched_tokens or max_num_seqs", device) from error
