"""Fills a model's parameters from safetensors or GGUF files, or with seeded random numbers."""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from engine.errors import ConfigError
from engine.layers.target import NumbersError, Slices, Source, Target, fill
from engine.model_config import ModelConfig, is_gguf, read_json
from engine.models.checkpoint import canonical_name, translate

_INDEX = "model.safetensors.index.json"
_LISTED_NAMES = 10
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_NUMBERED = re.compile(r"model\.layers\.(\d{1,9})\.(?:mlp\.experts\.(\d{1,9})\.)?")
_WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class LoadError(ConfigError):
    """The checkpoint does not fit the model or cannot be read; names the tensors and the file."""


def iter_stored(path: Path) -> Iterator[tuple[str, Source]]:
    """Yield (Hugging Face parameter name, what is stored) of a folder or a `.gguf` file.

    Tensors of a folder are views of mapped files, in the checkpoint's type; the matrices of a GGUF file are dequantised
    to float32 when they are asked for. Raises `LoadError` that names the file.
    """
    path = Path(path)
    if is_gguf(path):
        yield from _iter_gguf(path)
        return
    for file in weight_files(path):
        yield from _iter_safetensors(file)


def iter_weights(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """As `iter_stored`, but as CPU tensors, one at a time."""
    for name, stored in iter_stored(path):
        with _readable():
            tensor = stored[...]
        yield name, tensor


def check_size(path: Path, config: ModelConfig) -> None:
    """Raise `LoadError` if a checkpoint has fewer layers or experts than its config says, or a table of another shape.

    Looks at names and shapes alone: before a model is made of which most would be found to be missing.
    """
    layers = experts = 0
    for stored_name, stored in iter_stored(path):
        name = canonical_name(stored_name, config) or ""
        if match := _NUMBERED.match(name):
            layers = max(layers, int(match[1]) + 1)
            experts = max(experts, int(match[2] or -1) + 1)
        elif name == "model.embed_tokens.weight" and stored.shape != (config.vocab_size, config.hidden_size):
            raise _misshapen(path, name, stored.shape, (config.vocab_size, config.hidden_size))
    wanted = config.experts.count if config.experts and any(layer.sparse for layer in config.layers) else 0
    for what, found, count in (("layers", layers, config.num_layers), ("experts", experts, wanted)):
        if found < count:
            raise LoadError(f"{path}: the config says {count} {what}, but the weights are of {found}")


def load_weights(targets: Mapping[str, Target], path: Path, config: ModelConfig) -> None:
    """Hand a checkpoint to `targets`: for each Hugging Face parameter name, the part of the model to write.

    Those cast to their own type. Raises `LoadError` that lists the tensors which are missing or unexpected, or names
    the first that is misshapen, or has numbers that are not finite in the type that it is kept in.
    """
    missing = dict.fromkeys(targets)
    unexpected: list[str] = []
    with torch.no_grad():
        for name, tensor in translate(iter_stored(path), config):
            target = targets.get(name)
            if target is None:
                unexpected.append(name)
                continue
            if target.shape != tensor.shape:
                raise _misshapen(path, name, tensor.shape, target.shape)
            if tensor.dtype not in _WEIGHT_DTYPES:
                raise LoadError(f"{path}: the tensor {name} has the type {tensor.dtype}, which is not supported")
            try:
                with _readable():
                    fill(target, tensor)
            except NumbersError as error:
                culprit = _name_of(error.part, targets) or name
                raise LoadError(
                    f"{path}: the tensor {culprit} cannot be served: {error}. The file is damaged, or the model was "
                    "saved in a state that answers nothing: get it again"
                ) from error
            missing.pop(name, None)
    problems = [
        f"{what} {_listed(names)}" for what, names in (("missing", missing), ("unexpected", unexpected)) if names
    ]
    if problems:
        raise LoadError(f"{path} does not fit the model: {'; '.join(problems)}")


def _name_of(part: Target | None, targets: Mapping[str, Target]) -> str | None:
    """Of the tensor that fills it."""
    for name, target in targets.items():
        if target is part or (part is not None and isinstance(target, Slices) and target.hands_to(part)):
            return name
    return None


def random_weights(targets: Mapping[str, Target], seed: int) -> None:
    """Fill `targets` with normal(0, 0.02) numbers, norms with ones and biases with zeros.

    Each tensor's numbers depend on its name, its shape and the seed alone (and on the kind of device).
    """
    with torch.no_grad():
        for name, target in targets.items():
            # Made in float32 so that every dtype gets the same numbers, rounded.
            values = torch.empty(target.shape, dtype=torch.float32, device=target.device)
            if name.endswith("norm.weight"):
                values.fill_(1.0)
            elif name.endswith(".bias"):
                values.zero_()
            else:
                digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
                generator = torch.Generator(target.device).manual_seed(int.from_bytes(digest, "little") >> 1)
                values.normal_(0.0, 0.02, generator=generator)
            target.copy_(values)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder in Hugging Face layout. Raises `LoadError` when there are none."""
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    index = folder / _INDEX
    if index.is_file():
        return _indexed_files(index)
    pickles = sorted({file.name for pattern in _PICKLES for file in folder.glob(pattern)})
    if pickles:
        raise LoadError(
            f"{folder} has its weights only as pickles ({_listed(pickles)}), which run code when they are read: "
            "convert them to safetensors first"
        )
    raise LoadError(f"{folder} has no weights: neither model.safetensors nor {_INDEX} is there")


def _indexed_files(index: Path) -> list[Path]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise LoadError(f"{index}: weight_map must give a file name for each tensor")
    names = sorted(set(weight_map.values()))
    if outside := [name for name in names if Path(name).name != name]:
        raise LoadError(f"{index}: weight_map names files outside its folder: {_listed(outside)}")
    if absent := [name for name in names if not (index.parent / name).is_file()]:
        raise LoadError(f"{index} names files that are not there: {_listed(absent)}")
    return [index.parent / name for name in names]


def _iter_safetensors(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt", device="cpu") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - no mapping
                yield name, tensors.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise LoadError(f"{file} cannot be read: it is truncated or corrupt ({error})") from error


def _iter_gguf(path: Path) -> Iterator[tuple[str, Source]]:
    from engine.gguf.tensors import iter_tensors

    with _readable():
        yield from iter_tensors(path)


@contextmanager
def _readable() -> Iterator[None]:
    """What a file is found to lack when it is read, as a `LoadError`."""
    try:
        yield
    except ConfigError as error:
        raise LoadError(str(error)) from error


def _misshapen(path: Path, name: str, found: Sequence[int], wanted: Sequence[int]) -> LoadError:
    return LoadError(f"{path}: the tensor {name} has the shape {list(found)}, but the config makes it {list(wanted)}")


def _listed(names: Mapping[str, None] | list[str]) -> str:
    shown = list(names)[:_LISTED_NAMES]
    rest = len(names) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")
