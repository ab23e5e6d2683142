"""Configs and files that no one wrote on purpose: refused at once, in our words, whatever is in them."""

import math
import random
from pathlib import Path
from typing import Any

import gguf
import pytest

from engine.errors import ConfigError
from engine.hf.config import MOST, from_hf
from engine.loader import LoadError, check_size, iter_weights
from engine.model_config import load_model_config
from engine.models.families import FAMILIES
from engine.text.tokenizer import load_tokenizer
from tests import tiny_models
from tests.engine.build import SHAPE, build_engine
from tests.tiny_gguf import write_gguf

KEYS = [
    *SHAPE, "head_dim", "num_key_value_heads", "num_experts", "architectures", "quantization_config", "text_config",
    "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "rms_norm_eps", "hidden_act",
    "layer_types", "eos_token_id", "dtype", "tie_word_embeddings", "attention_bias", "mlp_bias",
    "use_bidirectional_attention",
]  # fmt: skip
VALUES: list[Any] = [
    None, True, -1, 0, 1, 1.5, math.nan, math.inf, 10**9, 10**400, "x", [], {}, [1], [None], [[]],
    {"rope_type": []}, {"rope_type": "linear", "factor": math.inf}, {"rope_theta": 10**400},
    {"rope_type": "longrope", "short_factor": [math.inf], "long_factor": [1]}, {"full_attention": {"rope_type": {}}},
]  # fmt: skip


@pytest.mark.parametrize("architecture", FAMILIES)
def test_any_value_of_any_key_is_taken_or_refused_by_name(architecture: str) -> None:
    family, refused = FAMILIES[architecture], []
    for windows in ({}, {"use_sliding_window": True, "sliding_window": 24}):
        for key in (*KEYS, *family.defaults):
            for value in VALUES:
                config = {"architectures": [architecture], **SHAPE, **windows, key: value}
                try:
                    found = from_hf(config, "config.json")
                except ConfigError as error:
                    refused.append(str(error))
                else:
                    assert found.num_layers <= MOST["num_hidden_layers"]
                    assert math.isfinite(found.rms_norm_eps + found.attention_scale + found.embedding_scale)
                    assert all(layer.rope is None or layer.rope.theta < 1e30 for layer in found.layers)
    assert all(error.startswith("config.json: ") and len(error) < 700 for error in refused)


@pytest.mark.parametrize("key", [*SHAPE, "head_dim", "num_key_value_heads"])
def test_more_than_any_model_has_is_refused_before_anything_is_made(tmp_path: Path, key: str) -> None:
    path = tiny_models.llama(tmp_path)
    tiny_models.edit_config(path, **{key: 10**9})
    with pytest.raises(ConfigError, match=f"{key} is 1000000000, but must be at most {MOST[key]}"):
        build_engine(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 9000}, "the config says 9000 layers, but the weights are of 2"),
        ({"vocab_size": 1 << 23}, r"embed_tokens.weight has the shape .* config makes it \[8388608, 64\]"),
        ({"hidden_size": 1 << 20}, r"embed_tokens.weight has the shape .* config makes it \[\d+, 1048576\]"),
    ],
)
def test_a_config_of_a_larger_model_than_the_weights_are_of_is_told_before_one_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, int], message: str
) -> None:
    path = tiny_models.llama(tmp_path, head_dim=16)
    tiny_models.edit_config(path, **changes)
    monkeypatch.setattr("engine.runner_setup.Decoder", None)
    with pytest.raises(LoadError, match=message):
        build_engine(path)


def test_weights_that_no_memory_holds_are_told(tmp_path: Path) -> None:
    path = tiny_models.llama(tmp_path, head_dim=16)
    tiny_models.edit_config(path, intermediate_size=1 << 24, hidden_size=1 << 20, num_hidden_layers=100)
    with pytest.raises(ConfigError, match="do not fit this machine's memory"):
        build_engine(path, load_format="dummy", dtype="bfloat16")


def read_all(file: Path) -> None:
    check_size(file, load_model_config(file))
    list(iter_weights(file))
    load_tokenizer(file).encode("hello")


def test_a_gguf_file_that_is_cut_or_changed_anywhere_is_read_or_refused(tmp_path: Path) -> None:
    file = write_gguf(tiny_models.llama(tmp_path / "m"), tmp_path / "m.gguf", gguf.GGMLQuantizationType.Q8_0)
    whole = file.read_bytes()
    header = min(tensor.data_offset for tensor in gguf.GGUFReader(file).tensors)
    rng = random.Random(0)
    numbers = [n.to_bytes(8, "little") for n in (0, 8, 10**9, 1 << 31, 1 << 62, (1 << 64) - 1)]
    refused = []
    for _ in range(400):
        data = bytearray(whole)
        at = rng.randrange(8, header - 8)
        match rng.randrange(3):
            case 0:
                del data[rng.choice([at, rng.randrange(header, len(data))]) :]
            case 1:
                data[at] = rng.randrange(256)
            case 2:
                data[at : at + 8] = rng.choice(numbers)
        file.write_bytes(data)
        try:
            read_all(file)
        except ConfigError as error:
            refused.append(str(error))
    assert len(refused) > 100
    assert all("m.gguf" in error for error in refused)


def test_a_tensor_of_a_gguf_file_that_reaches_into_another_is_refused(tmp_path: Path) -> None:
    file = write_gguf(tiny_models.llama(tmp_path / "m"), tmp_path / "m.gguf")
    data = file.read_bytes()
    info = next(t for t in gguf.GGUFReader(file).tensors if t.name == "blk.1.ffn_up.weight")
    at = data.index(b"blk.1.ffn_up.weight") + len(b"blk.1.ffn_up.weight") + 4 + 16 + 4
    start = info.data_offset - int.from_bytes(data[at : at + 8], "little")
    moved = info.data_offset + 32 - start
    file.write_bytes(data[:at] + moved.to_bytes(8, "little") + data[at + 8 :])
    with pytest.raises(LoadError, match=r"blk.1.ffn_up.weight cannot be read \(it has \d+ bytes, and another tensor"):
        list(iter_weights(file))
