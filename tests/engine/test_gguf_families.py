"""GGUF files of each family, written as llama.cpp writes them, against the folders they were made from."""

import dataclasses
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from engine.gguf.file import GGUFError, open_gguf
from engine.loader import iter_weights
from engine.model_config import load_model_config
from engine.models.families import FAMILIES
from tests import tiny_families
from tests.engine.build import build_engine
from tests.engine.test_exactness import greedy
from tests.scripted import drain
from tests.tiny_gguf import write_gguf

_GEMMA = {"query_pre_attn_scalar": 32}
CASES: dict[str, dict[str, Any]] = {
    "llama, biases, tied": {},
    "llama, linear rope": {},
    "llama, yarn rope": {},
    "mistral, no window": {"head_dim": 16},
    "mixtral": {"sliding_window": None, "head_dim": 16},
    "qwen2": {},
    "qwen3": {},
    "qwen3-moe": {},
    "smollm3": {"use_sliding_window": False, "no_rope_layer_interval": 4},
    "granite": {},
    "olmo2": {},
    "seed-oss": {},
    "olmo3": {},
    "olmo3, yarn": {},
    "phi3": {},
    "phi4-mini": {},
    "gemma2": _GEMMA,
    "gemma3": _GEMMA | {"sliding_window_pattern": 6, "num_hidden_layers": 7},
}
"""Cases of `tiny_families`, and what is changed in them since GGUF has no place for it: all published models agree."""


@pytest.fixture(params=CASES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tiny_families.write(request.param, tmp_path / "model", **CASES[request.param])


def test_a_gguf_gives_the_config_and_weights_of_the_folder_it_was_made_from(folder: Path, tmp_path: Path) -> None:
    file = write_gguf(folder, tmp_path / "m.gguf")
    expected, found = load_model_config(folder), load_model_config(file)
    if expected.architecture == "MistralForCausalLM":  # llama.cpp calls it a Llama
        expected = dataclasses.replace(expected, architecture="LlamaForCausalLM")
    assert found == expected
    weights, read = load_file(folder / "model.safetensors"), dict(iter_weights(file))
    assert read.keys() == weights.keys()
    for name, weight in weights.items():
        exact = not (FAMILIES[expected.architecture].norm_offset and name.endswith("norm.weight"))
        np.testing.assert_allclose(read[name].numpy(), weight, rtol=0, atol=0 if exact else 1e-7, err_msg=name)


@pytest.mark.parametrize("name", ["gemma3", "phi4-mini", "mixtral"])
def test_a_gguf_and_its_folder_give_the_same_tokens(name: str, tmp_path: Path) -> None:
    folder = tiny_families.write(name, tmp_path / "model", **CASES[name])
    results = []
    for path in (folder, write_gguf(folder, tmp_path / "m.gguf")):
        engine = build_engine(path)
        engine.add_request("a", list(range(5, 45)), greedy(24))
        results.append(drain(engine)["a"])
    assert results[0] == results[1]


def test_a_model_in_several_files_is_read_from_any_of_them(tmp_path: Path) -> None:
    folder = tiny_families.write("qwen3", tmp_path / "model")
    first = write_gguf(folder, tmp_path / "m.gguf", files=3)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    assert len(parts) == 3
    assert parts[0] == first
    weights = load_file(folder / "model.safetensors")
    for part in parts:
        read = dict(iter_weights(part))
        assert read.keys() == weights.keys()
        assert all(np.array_equal(read[name].numpy(), weight) for name, weight in weights.items())
        assert load_model_config(part) == load_model_config(folder)
    parts[1].unlink()
    with pytest.raises(GGUFError, match=r"one of 3 files, and of those m-00002-of-00003\.gguf are not beside it"):
        open_gguf(first)


READABLE = (
    "F32",
    "F16",
    "BF16",
    "Q8_0",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ4_NL",
)


@pytest.mark.parametrize("kind", READABLE)
def test_every_kind_of_number_is_what_the_gguf_package_says(kind: str, tmp_path: Path) -> None:
    quantization = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[quantization]
    raw = np.random.default_rng(0).integers(0, 60, (3, 512 // block * size), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("a.weight", raw, raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = open_gguf(tmp_path / "m.gguf")
    found = file.read("a.weight")
    assert found.shape == (3, 512)
    assert found.dtype == np.float32
    assert np.array_equal(found, gguf.dequantize(raw, quantization).reshape(3, 512), equal_nan=True)
    assert np.abs(found).max() > 0
    for rows, columns in ((slice(1, 3), slice(0, 512)), (slice(0, 2), slice(100, 300)), (slice(2, 2), slice(0, 512))):
        part = file.read_part("a.weight", rows, columns)
        assert part.flags.writeable
        assert np.array_equal(part, found[rows, columns], equal_nan=True)
