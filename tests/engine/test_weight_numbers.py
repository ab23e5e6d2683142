"""Checkpoints with numbers that no model can answer by: refused with the tensor's name, on every way that they load."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.layers.linear import Quantization
from engine.loader import LoadError, load_weights
from engine.model_config import load_model_config
from engine.models.decoder import Decoder
from kernels import cpu_ops
from kernels.attention import select_backend
from kernels.quantized_weight import MAX_WEIGHT, UnfitWeightError, quantize_weight
from tests import tiny_models
from tests.tiny_gguf import write_gguf

TENSORS = (
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.k_proj.weight",
    "model.layers.1.mlp.up_proj.weight",
    "model.layers.1.mlp.down_proj.weight",
    "model.layers.0.input_layernorm.weight",
    "lm_head.weight",
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.llama(tmp_path_factory.mktemp("llama"))


def damaged(whole: Path, folder: Path, name: str, value: float, dtype: torch.dtype = torch.float32) -> Path:
    """A copy with one number of one tensor, near its end, in the place of another."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes((whole / "config.json").read_bytes())
    (folder / "generation_config.json").write_bytes((whole / "generation_config.json").read_bytes())
    weights = {key: weight.to(dtype) for key, weight in load_file(whole / "model.safetensors").items()}
    weights[name].view(-1)[-2] = value
    save_file(weights, folder / "model.safetensors")
    return folder


def load(path: Path, *, dtype: str = "float32", quantization: Quantization | None = None, group: Any = None) -> Decoder:
    config = load_model_config(path)
    model = Decoder(
        config,
        select_backend("cpu", torch.float32, config.head_dim),
        max_positions=64,
        dtype=getattr(torch, dtype),
        device=torch.device("cpu"),
        quantization=quantization,
        group=group,
    )
    load_weights(model.targets(), path, config)
    return model


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_numbers_that_are_not_finite_are_refused_in_every_tensor(
    whole: Path, tmp_path: Path, name: str, value: float, quantization: Quantization | None
) -> None:
    path = damaged(whole, tmp_path, name, value)
    with pytest.raises(LoadError, match=rf"the tensor {name} .*1 of its \d+ numbers are NaN or infinite"):
        load(path, quantization=quantization)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("how", [{}, {"quantization": "int8"}, {"dtype": "bfloat16"}, {"dtype": "float16"}])
def test_they_are_refused_whatever_they_are_stored_in_and_served_as(
    whole: Path, tmp_path: Path, stored: torch.dtype, how: dict[str, Any]
) -> None:
    path = damaged(whole, tmp_path, TENSORS[2], math.nan, stored)
    with pytest.raises(LoadError, match=TENSORS[2]):
        load(path, **how)


def test_they_are_refused_without_the_kernels(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_ops, "load", lambda: False)
    path = damaged(whole, tmp_path, TENSORS[2], math.nan)
    for quantization in (None, "int8"):
        with pytest.raises(LoadError, match=TENSORS[2]):
            load(path, quantization=quantization)


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_0"])
def test_they_are_refused_in_gguf_files(whole: Path, tmp_path: Path, kind: str) -> None:
    file = write_gguf(whole, tmp_path / "model.gguf", gguf.GGMLQuantizationType[kind])
    info = next(t for t in gguf.GGUFReader(file).tensors if t.name == "blk.1.ffn_up.weight")
    data = bytearray(file.read_bytes())
    # Of codes, the scale of the first group; else the first number.
    nan = torch.tensor([math.nan], dtype=torch.float32 if kind == "F32" else torch.float16).numpy().tobytes()
    data[info.data_offset : info.data_offset + len(nan)] = nan
    file.write_bytes(data)
    with pytest.raises(LoadError, match=r"model\.layers\.1\.mlp\.up_proj\.weight .*NaN or infinite"):
        load(file)


def test_a_rank_refuses_them_in_what_it_holds(tmp_path: Path) -> None:
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "hidden_size": 64}
    path = tiny_models.llama(tmp_path, **sizes)
    path = damaged(path, path, TENSORS[1], math.nan)
    for quantization in (None, "int8"):
        load(path, quantization=quantization, group=SimpleNamespace(rank=0, size=2))
        with pytest.raises(LoadError, match=TENSORS[1]):
            load(path, quantization=quantization, group=SimpleNamespace(rank=1, size=2))


@pytest.mark.parametrize(
    ("value", "how", "message"),
    [
        (1e5, {"dtype": "float16"}, r"numbers up to 1e\+05, but float16 holds none above 6.55e\+04"),
        (1e7, {"quantization": "int8"}, r"numbers up to 1e\+07, but int8 holds none above 8.319e\+06"),
        (1e39, {}, "numbers up to 1e\\+39, but float32 holds none above"),
    ],
)
def test_numbers_are_refused_that_are_too_large_for_what_they_are_served_as(
    whole: Path, tmp_path: Path, value: float, how: dict[str, Any], message: str
) -> None:
    path = damaged(whole, tmp_path, TENSORS[2], value, torch.float64)
    with pytest.raises(LoadError, match=message):
        load(path, **how)


def test_the_largest_weight_that_int8_takes_is_the_largest_that_it_can_round() -> None:
    row = torch.zeros(48, 32)
    row[0, 0] = MAX_WEIGHT
    assert quantize_weight(row).unpack()[0, 0].item() == MAX_WEIGHT
    row[0, 0] = MAX_WEIGHT * 1.001
    with pytest.raises(UnfitWeightError):
        quantize_weight(row)
