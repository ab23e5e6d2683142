"""What each rank holds of a model: its slices of the checkpoint and no more, and which models cannot be cut."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.gguf.file import GGUFFile
from engine.layers.linear import Linear, Quantization
from engine.loader import load_weights, random_weights
from engine.model_config import ExpertsConfig, LayerConfig, ModelConfig, load_model_config
from engine.models.decoder import Decoder
from engine.parallel.shares import Span, share
from engine.runner_setup import load_runner
from kernels.attention import select_backend
from kernels.linear import PackedWeight
from kernels.quantized_weight import QuantizedWeight
from tests import tiny_models
from tests.tiny_gguf import write_gguf

ROOT = Path(__file__).parents[2]


def rank_of(rank: int, size: int) -> Any:
    """A group whose ranks need not talk: they only load."""
    return SimpleNamespace(rank=rank, size=size)


def decoder(path: Path, size: int, rank: int, quantization: Quantization | None = None, dummy: bool = False) -> Decoder:
    config = load_model_config(path)
    model = Decoder(
        config,
        select_backend("cpu", torch.float32, config.head_dim),
        max_positions=64,
        dtype=torch.float32,
        device=torch.device("cpu"),
        quantization=quantization,
        group=None if size == 1 else rank_of(rank, size),
    )
    if dummy:
        random_weights(model.targets(), seed=3)
    else:
        load_weights(model.targets(), path, config)
    return model


def values(layer: Linear) -> Tensor:
    """float32 [rows, columns]."""
    weight = layer.weight
    return weight.unpack() if isinstance(weight, PackedWeight | QuantizedWeight) else weight


def by_columns(models: list[Decoder], pick: Callable[[Decoder], Linear]) -> Tensor:
    return torch.cat([values(pick(model)) for model in models], dim=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three heads of 32, one KV head, 96 inner features, 383 tokens: of each of the three ranks, one head."""
    return tiny_models.llama(
        tmp_path_factory.mktemp("models") / "three",
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=32,
        hidden_size=96,
        attention_bias=True,
        vocab_size=383,
    )


@pytest.mark.parametrize("how", ["float32", "int8", "dummy", "q8_0", "q4_0"])
def test_ranks_hold_slices_of_the_very_same_numbers(folder: Path, tmp_path: Path, how: str) -> None:
    """Also where the numbers are rounded in groups of columns, or were found to be codes."""
    path, quantization = folder, "int8" if how == "int8" else None
    if how.startswith("q"):
        path = write_gguf(folder, tmp_path / "model.gguf", gguf.GGMLQuantizationType[how.upper()])
    whole, *ranks = (
        decoder(path, size, rank, quantization, dummy=how == "dummy") for size, rank in ((1, 0), (3, 0), (3, 1), (3, 2))
    )
    for i, layer in enumerate(whole.layers):
        for pick in (lambda model, i=i: model.layers[i].attention.output, lambda model, i=i: model.layers[i].mlp.down):
            assert torch.equal(by_columns(ranks, pick), values(pick(whole)))
        q, k, v = values(layer.attention.qkv).split([96, 32, 32])
        for rank, model in enumerate(ranks):
            held = values(model.layers[i].attention.qkv)
            assert torch.equal(held, torch.cat([q[32 * rank : 32 * rank + 32], k, v]))
        bias = [model.layers[i].attention.output.bias for model in ranks]
        assert torch.equal(bias[0], layer.attention.output.bias)
        assert bias[1:] == [None, None]
    heads = torch.cat([values(model.head) for model in ranks])
    assert torch.equal(heads[:383], values(whole.head))
    assert len(heads) == 384
    assert not heads[383:].any()
    if how.startswith("q"):
        assert all(isinstance(model.layers[0].mlp.down.weight.data, QuantizedWeight) for model in ranks)


def test_shares_cover_the_whole_and_keep_groups_of_columns_together() -> None:
    config = shape(num_heads=12, num_kv_heads=2, intermediate_size=11 * 32, vocab_size=1001)
    shares = [share(config, rank_of(rank, 4)) for rank in range(4)]
    assert [s.heads for s in shares] == [Span(3 * rank, 3, 12) for rank in range(4)]
    assert [s.kv_heads for s in shares] == [Span(0, 1, 2), Span(0, 1, 2), Span(1, 1, 2), Span(1, 1, 2)]
    assert [s.inner.size // 32 for s in shares] == [2, 3, 3, 3]
    assert [s.inner.start for s in shares[1:]] == [s.inner.start + s.inner.size for s in shares[:3]]
    assert [s.vocabulary for s in shares] == [Span(251 * rank, 251, 1001) for rank in range(4)]


def shape(**changes: Any) -> ModelConfig:
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=1000,
        hidden_size=576,
        intermediate_size=1536,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_position_embeddings=128,
        layers=(LayerConfig(),) * 2,
    )
    return replace(config, **changes)


@pytest.mark.parametrize(
    ("config", "size", "quantized", "message"),
    [
        (shape(), 2, False, "size is 2, but the model has 9 attention heads, .* it may be 1, 3, 9$"),
        (shape(num_heads=12), 2, False, "the model has 3 KV heads, of which 2 ranks .* may be 1, 3, 6, 12$"),
        (shape(num_heads=8, num_kv_heads=8, head_dim=24), 8, True, "1 heads of 24 are 24 columns .* 1, 2$"),
        (shape(intermediate_size=1530), 9, True, "intermediate size is 1530, .* groups of 32, .* may be 1$"),
        (shape(intermediate_size=1531), 3, False, "intermediate size is 1531, .* evenly by 3 ranks"),
        (
            shape(layers=(LayerConfig(sparse=True),), experts=ExpertsConfig(4, 2, 31, True)),
            3,
            False,
            "experts' intermediate size is 31",
        ),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused_with_the_numbers(
    config: ModelConfig, size: int, quantized: bool, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        share(config, rank_of(0, size), quantized=quantized)


def test_settings_and_group_must_agree(folder: Path) -> None:
    config = EngineConfig.from_kwargs(model=str(folder), device="cpu", tensor_parallel_size=3)
    with pytest.raises(ConfigError, match="tensor_parallel_size is 3, but 1 rank runs this model"):
        load_runner(config, folder)


def test_a_rank_reads_its_own_part_of_a_gguf_file(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(folder, tmp_path / "model.gguf", gguf.GGMLQuantizationType.Q8_0)
    read, taken = GGUFFile.read_part, dict[str, list[tuple[int, ...]]]()

    def noted(file: GGUFFile, name: str, rows: slice, columns: slice) -> Any:
        values = read(file, name, rows, columns)
        taken.setdefault(name, []).append(values.shape)
        return values

    monkeypatch.setattr(GGUFFile, "read_part", noted)
    decoder(path, 3, 1)
    assert taken["token_embd.weight"] == [(128, 96)]
    assert taken["blk.0.attn_q.weight"] == [(32, 96)]
    assert taken["blk.0.attn_k.weight"] == [(32, 96)]  # of the one head that all share
    assert taken["blk.0.attn_output.weight"] == [(96, 32)]
    inner = load_model_config(path).intermediate_size // 3
    assert taken["blk.0.ffn_gate.weight"] == [(inner, 96)]
    assert taken["blk.0.ffn_down.weight"] == [(96, inner)]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 112 MiB in float32."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "vocab_size": 16384}
    return tiny_models.llama(tmp_path_factory.mktemp("large"), head_dim=64, num_attention_heads=8, **sizes)


@pytest.mark.parametrize("form", ["folder", "gguf"])
def test_a_rank_never_holds_more_than_its_share(large: Path, tmp_path: Path, form: str) -> None:
    """One of two ranks; what a matrix takes while it is laid out comes on top."""
    path, whole = large, (large / "model.safetensors").stat().st_size / 2**20
    if form == "gguf":
        path = write_gguf(path, tmp_path / "model.gguf")
    code = """
import re, sys, torch
from pathlib import Path
import engine.loader
from tests.engine.test_shares import decoder

def private_mib():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024

def watched(path, read=engine.loader.iter_stored):
    for name, tensor in read(path):
        seen.append(private_mib())
        yield name, tensor

engine.loader.iter_stored, seen = watched, []
before = private_mib()
model = decoder(Path(sys.argv[1]), 2, 1)
print(max(*seen, private_mib()) - before)
"""
    command = [sys.executable, "-c", code, str(path)]
    peak = float(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    assert whole > 100
    assert whole / 2 < peak < whole / 2 + 24
