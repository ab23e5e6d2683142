"""One adapter as it is read from PEFT's folder: its low-rank matrices, by the layers of the model they belong to."""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import torch
from torch import Tensor

from engine.lora.peft import CONFIG, parse_config
from engine.lora.request import AdapterError
from engine.model_config import ModelConfig
from engine.models.checkpoint import canonical_name

WEIGHTS = "adapter_model.safetensors"
_PICKLE = "adapter_model.bin"

_TENSOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<which>[AB])(?:\.[^.]+)?\.weight")
_LISTED = 5


@dataclass(frozen=True, slots=True)
class TargetModule:
    """A module that an adapter may change: one projection of a fused layer, or, where checkpoints store them as one
    matrix, several.

    layer: the fused layer's number. parts: the projections' numbers in it, and sizes: their output features.
    """

    layer: int
    parts: tuple[int, ...]
    sizes: tuple[int, ...]
    in_features: int


@dataclass(frozen=True, slots=True)
class LowRank:
    """What is added to one projection's weight is b a. a: [rank, in_features]; b: [out_features, rank], scaled."""

    a: Tensor
    b: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """digest: of the files, in hexadecimal; equal ones give equal tokens. parts: by (fused layer, projection)."""

    digest: str
    parts: Mapping[tuple[int, int], LowRank]


def read_adapter(
    folder: Path, targets: Mapping[str, TargetModule], config: ModelConfig, max_rank: int, dtype: torch.dtype
) -> Adapter:
    """Read `adapter_config.json` and `adapter_model.safetensors` of a folder.

    targets: by module name, as in a checkpoint of the model. Raises `AdapterError` that says what cannot be served.
    """
    config_text, data = _read(folder)
    peft = parse_config(config_text, folder / CONFIG)
    parts: dict[tuple[int, int], LowRank] = {}
    for module, name, a, b in _pairs(data, folder / WEIGHTS, config):
        target = targets.get(module)
        if target is None:
            raise AdapterError(f"{folder / WEIGHTS}: {_no_target(module, targets)}")
        rank, out_features = peft.rank_of(name), sum(target.sizes)
        if a.shape != (rank, target.in_features) or b.shape != (out_features, rank):
            raise AdapterError(
                f"{folder / WEIGHTS}: A and B of {module} have the shapes {list(a.shape)} and {list(b.shape)}, but "
                f"rank {rank} and this model make them [{rank}, {target.in_features}] and [{out_features}, {rank}]."
            )
        if rank > max_rank:
            raise AdapterError(
                f"{folder}: {module} has rank {rank}, above max_lora_rank, which is {max_rank}: start with "
                f"max_lora_rank={peft.highest_rank} or more."
            )
        a, scaled = a.to(dtype), (b.float() * peft.scale_of(name)).to(dtype)
        if not (a.isfinite().all() and scaled.isfinite().all()):
            kind = str(dtype).removeprefix("torch.")
            raise AdapterError(
                f"{folder / WEIGHTS}: A or scaled B of {module} has numbers that are not finite in {kind}."
            )
        for part, rows in zip(target.parts, scaled.split(target.sizes), strict=True):
            parts[target.layer, part] = LowRank(a, rows.contiguous())
    if not parts:
        raise AdapterError(f"{folder / WEIGHTS} has no matrices for this model.")
    digest = blake2b(len(config_text).to_bytes(8, "little") + config_text, digest_size=16)
    digest.update(data)
    return Adapter(digest.hexdigest(), parts)


def _read(folder: Path) -> tuple[bytes, bytes]:
    """What the digest is of is what is used: each file is read once."""
    if not os.path.isdir(folder):  # unlike `Path.is_dir`, false for names that no file can have
        raise AdapterError(f"No adapter found: {str(folder)!r} is no folder where the engine runs.", is_missing=True)
    if not (folder / CONFIG).is_file():
        raise AdapterError(f"No adapter found: {folder} has no {CONFIG}.", is_missing=True)
    if not (folder / WEIGHTS).is_file():
        if (folder / _PICKLE).exists():
            raise AdapterError(
                f"{folder} has its weights as a pickle ({_PICKLE}), which runs code when it is read: save them as "
                f"{WEIGHTS}."
            )
        raise AdapterError(f"No adapter found: {folder} has no {WEIGHTS}.", is_missing=True)
    try:
        return (folder / CONFIG).read_bytes(), (folder / WEIGHTS).read_bytes()
    except OSError as error:
        raise AdapterError(f"{folder} cannot be read: {error.strerror}.") from error


def _pairs(data: bytes, file: Path, config: ModelConfig) -> Iterator[tuple[str, str, Tensor, Tensor]]:
    """(module as this model calls it, as the file does, A, B)."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(data)
    except SafetensorError as error:
        raise AdapterError(f"{file} cannot be read: it is truncated or corrupt ({error}).") from error
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if (match := _TENSOR.fullmatch(name)) is None:
            raise AdapterError(f"{file}: {_refused(name)}")
        if not tensor.is_floating_point() or tensor.dim() != 2:
            raise AdapterError(f"{file}: {name} is {tensor.dtype} of {tensor.dim()} dimensions, no matrix of numbers.")
        pair = found.setdefault(match["module"], {})
        if match["which"] in pair:
            raise AdapterError(
                f"{file}: {match['module']} has lora_{match['which']} twice: save one adapter to a folder."
            )
        pair[match["which"]] = tensor
    for module, pair in found.items():
        if len(pair) < 2:
            raise AdapterError(f"{file}: {module} has lora_{'AB'['A' in pair]}.weight missing.")
        ours = canonical_name(f"model.{module}" if module.startswith("layers.") else module, config)
        if ours is not None:  # else of a part that is not computed here
            yield ours, module, pair["A"], pair["B"]


def _refused(name: str) -> str:
    for mark, what in (
        ("lora_magnitude_vector", "DoRA"),
        ("lora_embedding_", "low-rank embeddings"),
        ("modules_to_save", "whole modules"),
        (".bias", "biases"),
    ):
        if mark in name:
            return f"{what} cannot be served, and there is {name}."
    return f"{name} is no lora_A.weight or lora_B.weight; only those of projections can be served."


def _no_target(module: str, targets: Mapping[str, TargetModule]) -> str:
    kinds = ", ".join(sorted({name.rsplit(".", 1)[-1] for name in targets}))
    return f"an adapter of {module} cannot be served; those of {kinds} in the model's layers can."
