"""Translates a GGUF file's tensors into those of a checkpoint in Hugging Face layout: names, and the order of rows.

Source of what is undone here: llama.cpp's converter. It interleaves the rows of q and k for a rotation of neighbours,
stacks the experts of a layer, and adds what Gemma's norms leave out.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.gguf.config import ROPE_FACTORS, hf_architecture
from engine.gguf.file import GGUFFile, TensorInfo, Values, open_gguf
from engine.layers.target import Source
from engine.models.families import FAMILIES, Family

_LAYER_MODULES = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "self_attn.qkv_proj",
    "self_attn.q_norm", "self_attn.k_norm",
    "mlp.gate", "mlp.experts.gate_proj", "mlp.experts.up_proj", "mlp.experts.down_proj",
)  # fmt: skip

_DENSE_MODULES = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_FUSED_MODULES = ("mlp.gate_up_proj", "mlp.down_proj")


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A matrix in the file, of which what is asked for is read and dequantised: `Source`.

    first_row: of its rows within the file's tensor. order: for each of its rows, which of the file's it is; None: as
    they are.
    """

    file: GGUFFile
    name: str
    shape: torch.Size
    first_row: int = 0
    order: npt.NDArray[np.int64] | None = None

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def __getitem__(self, index: Any) -> torch.Tensor:
        """index: slices of rows and columns, or `...`."""
        spans = (slice(None), slice(None)) if index is ... else index
        rows, columns = (slice(*span.indices(size)[:2]) for span, size in zip(spans, self.shape, strict=True))
        if self.order is None:
            values = self._read(rows, columns)
        else:
            order = self.order[rows]
            first = order.min(initial=len(self.order))
            values = self._read(slice(first, order.max(initial=first - 1) + 1), columns)[order - first]
        return torch.from_numpy(values)

    def _read(self, rows: slice, columns: slice) -> Values:
        return self.file.read_part(self.name, slice(self.first_row + rows.start, self.first_row + rows.stop), columns)


def iter_tensors(path: Path) -> Iterator[tuple[str, Source]]:
    """Yield (Hugging Face parameter name, float32 numbers) of each tensor; one without such a name keeps its own.

    Matrices are read when they are asked for. Raises `ConfigError` naming the file, as reading one does.
    """
    file = open_gguf(path)
    family = FAMILIES[hf_architecture(file)]
    modules = _hf_modules(file, family)
    num_heads = file.count("attention.head_count")
    heads = {"q_proj": num_heads, "k_proj": file.get("attention.head_count_kv", num_heads)}
    for name, info in file.tensors.items():
        if name in ROPE_FACTORS:  # in the config by now
            continue
        module, _, suffix = name.rpartition(".")
        hf_module = modules.get(module, module)
        projection = hf_module.rpartition(".")[2]
        order = _unpermuted(info.shape[0], heads[projection]) if family.gguf_permuted and projection in heads else None
        for hf_name, part in _parts(file, f"{hf_module}.{suffix}", info, order):
            if family.norm_offset and hf_module.endswith("norm"):
                part = part[...] - 1.0
            for theirs, ours in family.renames.items():
                hf_name = hf_name.replace(ours, theirs)
            yield hf_name, part


def _hf_modules(file: GGUFFile, family: Family) -> dict[str, str]:
    """Hugging Face's name of each module by GGUF's, from the table of the `gguf` package."""
    import gguf

    name = file.metadata["general.architecture"]
    num_layers = min(file.count("block_count"), len(file.tensors))  # which a damaged file may have in millions
    table = gguf.get_tensor_name_map(next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == name), num_layers)
    modules = ["model.embed_tokens", "model.norm", "lm_head"]
    layer = _LAYER_MODULES + (_FUSED_MODULES if family.fused_projections else _DENSE_MODULES)
    modules += [f"model.layers.{i}.{module}" for i in range(num_layers) for module in layer]
    return {gguf_name: module for module in modules if (gguf_name := table.get_name(module))}


def _parts(
    file: GGUFFile, name: str, info: TensorInfo, order: npt.NDArray[np.int64] | None
) -> Iterator[tuple[str, Source]]:
    """A tensor under its name; the experts of a layer, [experts, rows, columns], one by one."""
    before, stacked, projection = name.partition(".experts.")
    if stacked and len(info.shape) == 3:
        experts, rows, columns = info.shape
        for i in range(experts):
            matrix = StoredMatrix(file, info.name, torch.Size((rows, columns)), first_row=i * rows)
            yield f"{before}.experts.{i}.{projection}", matrix
    elif len(info.shape) == 2:
        yield name, StoredMatrix(file, info.name, torch.Size(info.shape), order=order)
    else:
        values = file.read(info.name)
        yield name, torch.from_numpy(values if order is None else values[order])


def _unpermuted(rows: int, num_heads: int) -> npt.NDArray[np.int64] | None:
    """Where each head's rows are, in two halves, that lie in pairs side by side."""
    if rows % (2 * num_heads):  # misshapen: the loader says so, by name
        return None
    pairs = np.arange(rows).reshape(num_heads, rows // num_heads // 2, 2)  # [heads, pairs, 2]
    return pairs.swapaxes(1, 2).reshape(rows)
