import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ConfigError
from engine.hf.config import from_hf
from engine.loader import LoadError, iter_weights, load_weights, random_weights
from engine.model_config import LayerConfig, RopeConfig, load_model_config
from tests import tiny_models
from tests.engine.build import SHAPE

ROOT = Path(__file__).parents[2]

BASE = {"architectures": ["LlamaForCausalLM"], **SHAPE}
UNTIED = from_hf(BASE, "config.json")
TIED = from_hf(BASE | {"tie_word_embeddings": True}, "config.json")


@pytest.fixture(scope="module")
def llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def folder(tmp_path: Path, llama_dir: Path) -> Path:
    """A copy of the tiny Llama that a test may damage."""
    for file in ("config.json", "generation_config.json", "model.safetensors"):
        (tmp_path / file).write_bytes((llama_dir / file).read_bytes())
    return tmp_path


def empty_like(weights: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {name: torch.full(weight.shape, math.nan, dtype=dtype) for name, weight in weights.items()}


def hf_weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


# ---- weights


def test_a_single_file_and_shards_give_the_same_weights(llama_dir: Path, tmp_path: Path) -> None:
    sharded = tiny_models.llama(tmp_path, shards=3)
    assert len(list(sharded.glob("*.safetensors"))) >= 3
    assert_same(dict(iter_weights(sharded)), hf_weights(llama_dir))
    assert_same(dict(iter_weights(llama_dir)), hf_weights(llama_dir))


def test_weights_go_into_views_of_a_fused_parameter(llama_dir: Path) -> None:
    weights = hf_weights(llama_dir)
    prefix = "model.layers.0.self_attn."
    rows = {name: weights[f"{prefix}{name}.weight"].shape[0] for name in ("q_proj", "k_proj", "v_proj")}
    fused = torch.zeros(sum(rows.values()), 64)
    targets = empty_like(weights)
    for name, part in zip(rows, fused.split(list(rows.values())), strict=True):
        targets[f"{prefix}{name}.weight"] = part
    load_weights(targets, llama_dir, UNTIED)
    assert torch.equal(fused, torch.cat([weights[f"{prefix}{name}.weight"] for name in rows]))
    assert_same(targets, weights)


def test_weights_are_cast_to_the_type_of_the_target(llama_dir: Path) -> None:
    weights = hf_weights(llama_dir)
    targets = empty_like(weights, torch.bfloat16)
    load_weights(targets, llama_dir, UNTIED)
    assert_same(targets, {name: weight.bfloat16() for name, weight in weights.items()})


def test_a_tied_model_skips_the_output_weights_and_old_rotary_buffers(folder: Path) -> None:
    weights = hf_weights(folder)
    save_file(weights | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}, folder / "model.safetensors")
    targets = empty_like(weights)
    del targets["lm_head.weight"]
    load_weights(targets, folder, TIED)
    del weights["lm_head.weight"]
    assert_same(targets, weights)


def test_all_missing_tensors_are_named_up_to_ten(folder: Path) -> None:
    weights = hf_weights(folder)
    extra = {f"model.layers.{i}.extra.weight": torch.zeros(1) for i in range(12)}
    with pytest.raises(LoadError) as caught:
        load_weights(empty_like(weights | extra), folder, UNTIED)
    assert str(folder) in str(caught.value)
    assert all(name in str(caught.value) for name in list(extra)[:10])
    assert "and 2 more" in str(caught.value)


def test_missing_and_unexpected_tensors_are_named_together(folder: Path) -> None:
    targets = empty_like(hf_weights(folder))
    targets["model.norm2.weight"] = targets.pop("model.norm.weight")
    with pytest.raises(LoadError, match=r"missing model\.norm2\.weight; unexpected model\.norm\.weight"):
        load_weights(targets, folder, UNTIED)


def test_an_untied_model_misses_output_weights_that_are_not_there(folder: Path) -> None:
    weights = hf_weights(folder)
    targets = empty_like(weights)
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(LoadError, match=r"missing lm_head\.weight"):
        load_weights(targets, folder, UNTIED)


def test_a_misshapen_tensor_is_named_with_both_shapes(folder: Path) -> None:
    targets = empty_like(hf_weights(folder))
    targets["model.norm.weight"] = torch.zeros(1, 64)  # copy_ alone would broadcast it
    with pytest.raises(LoadError, match=r"model\.norm\.weight has the shape \[64\], but the config makes it \[1, 64\]"):
        load_weights(targets, folder, UNTIED)


def test_weights_of_a_quantised_type_are_refused(folder: Path) -> None:
    weights = hf_weights(folder)
    targets = empty_like(weights)
    weights["model.norm.weight"] = torch.ones(64, dtype=torch.int8)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(LoadError, match=r"model\.norm\.weight has the type torch\.int8"):
        load_weights(targets, folder, UNTIED)


def test_a_shard_that_the_index_names_must_be_there(tmp_path: Path) -> None:
    sharded = tiny_models.llama(tmp_path, shards=3)
    gone = sorted(sharded.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(LoadError, match=gone.name):
        list(iter_weights(sharded))


def test_an_index_cannot_name_files_outside_its_folder(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": "../model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(LoadError, match="outside its folder"):
        list(iter_weights(folder))


@pytest.mark.parametrize("index", ["{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', "[1]", "{"])
def test_a_broken_index_is_named(index: str, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ConfigError, match=r"model\.safetensors\.index\.json"):
        list(iter_weights(folder))


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_truncated_file_is_named(keep: int, folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(LoadError, match=r"model\.safetensors cannot be read: it is truncated or corrupt"):
        list(iter_weights(folder))


def test_a_folder_with_only_pickles_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(LoadError, match="has no weights"):
        list(iter_weights(folder))
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(LoadError, match=r"only as pickles \(pytorch_model\.bin\)"):
        list(iter_weights(folder))


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 checkpoint of 130 MiB."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 7, "vocab_size": 4096}
    return tiny_models.llama(tmp_path_factory.mktemp("large"), **sizes)


@pytest.mark.parametrize(
    ("settings", "most"), [({}, 1.1), ({"quantization": "int8"}, 0.4), ({"dtype": "bfloat16"}, 0.6)]
)
def test_loading_holds_each_weight_once_in_the_form_it_is_served_in(
    settings: dict[str, str], most: float, large: Path
) -> None:
    """Private memory after each tensor of the checkpoint, over the size of that."""
    code = """
import re, sys, torch
from pathlib import Path
from engine import loader
from engine.model_config import load_model_config
from engine.models.decoder import Decoder
from kernels import cpu_ops
from kernels.attention import select_backend

def private_bytes():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

def watched(path, read=loader.iter_stored):
    for name, tensor in read(path):
        seen.append(private_bytes())
        yield name, tensor
    seen.append(private_bytes())

loader.iter_stored, seen = watched, []
folder, dtype, quantization = Path(sys.argv[1]), getattr(torch, sys.argv[2]), sys.argv[3] or None
config, device = load_model_config(folder), torch.device("cpu")
backend = select_backend("cpu", dtype, config.head_dim)
cpu_ops.load()
before = private_bytes()
model = Decoder(config, backend, max_positions=16, dtype=dtype, device=device, quantization=quantization)
loader.load_weights(model.targets(), folder, config)
print((max(seen) - before) / (folder / "model.safetensors").stat().st_size)
"""
    arguments = [str(large), settings.get("dtype", "float32"), settings.get("quantization", "")]
    command = [sys.executable, "-c", code, *arguments]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert float(output) < most


# ---- random weights


def test_random_weights_depend_on_name_and_seed_but_not_on_order_or_type() -> None:
    def targets(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
        names = ("a.weight", "b.weight")
        return {name: torch.empty(200, 100, dtype=dtype) for name in names}

    first, second, rounded, other = targets(), targets(), targets(torch.bfloat16), targets()
    random_weights(first, seed=1)
    random_weights(dict(reversed(second.items())), seed=1)
    random_weights(rounded, seed=1)
    random_weights(other, seed=2)
    assert_same(second, first)
    assert_same(rounded, {name: tensor.bfloat16() for name, tensor in first.items()})
    assert not torch.equal(first["a.weight"], first["b.weight"])
    assert not torch.equal(first["a.weight"], other["a.weight"])
    assert first["a.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert abs(first["a.weight"].mean().item()) < 0.001


def test_random_norms_are_ones_and_biases_zeros_in_views_too() -> None:
    fused = torch.full((30,), math.nan)
    names = ("model.norm.weight", "model.layers.0.self_attn.q_norm.weight", "model.layers.0.self_attn.q_proj.bias")
    random_weights(dict(zip(names, fused.split(10), strict=True)), seed=0)
    assert torch.equal(fused, torch.tensor([1.0] * 20 + [0.0] * 10))


# ---- config


def test_the_config_of_a_folder_is_read_whole(llama_dir: Path, tmp_path: Path) -> None:
    config = load_model_config(llama_dir)
    assert (config.architecture, config.vocab_size, config.hidden_size) == ("LlamaForCausalLM", 384, 64)
    assert (config.intermediate_size, config.num_layers, config.num_heads, config.num_kv_heads) == (96, 2, 4, 2)
    assert (config.head_dim, config.max_position_embeddings, config.rms_norm_eps) == (16, 1024, 1e-5)
    assert (config.tie_word_embeddings, config.qkv_bias, config.output_bias, config.qk_norm) == (
        False,
        False,
        False,
        "none",
    )
    assert config.layers == (LayerConfig(RopeConfig(10000.0)),) * 2
    assert (config.dtype, config.eos_token_ids) == ("float32", (2,))

    qwen = load_model_config(tiny_models.qwen3(tmp_path, rope_parameters={"rope_theta": 1e6, "rope_type": "default"}))
    assert (qwen.architecture, qwen.qk_norm, qwen.head_dim) == ("Qwen3ForCausalLM", "head", 32)
    assert (qwen.layers[0].rope, qwen.tie_word_embeddings) == (RopeConfig(1e6), True)


QWEN2, SMOLLM3, MIXTRAL, GEMMA3, PHI3 = (
    {"architectures": [f"{name}ForCausalLM"]} for name in ("Qwen2", "SmolLM3", "Mixtral", "Gemma3", "Phi3")
)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_keys_that_may_be_left_out_get_the_architecture_s_defaults() -> None:
    config = from_hf(BASE, "config.json")
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (4, 16, 1e-6)
    assert (config.layers[0].rope, config.eos_token_ids) == (RopeConfig(10000.0), ())
    assert from_hf(BASE | {"architectures": ["Qwen3ForCausalLM"]}, "config.json").head_dim == 128


def test_null_switches_off_what_a_missing_key_leaves_on() -> None:
    mistral = BASE | {"architectures": ["MistralForCausalLM"], "num_key_value_heads": 2}
    assert from_hf(mistral, "config.json").layers[0].window == 4096
    assert from_hf(mistral | {"sliding_window": None}, "config.json").layers[0].window == 0
    gemma = {"architectures": ["Gemma2ForCausalLM"]}
    assert from_hf(gemma, "config.json").attention_soft_cap == 50.0
    assert from_hf(gemma | {"attn_logit_softcapping": None}, "config.json").attention_soft_cap == 0.0


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_parameters": LLAMA3 | {"rope_theta": 500000.0}},
        {"rope_theta": 500000.0, "rope_scaling": LLAMA3},
        {"rope_theta": 500000.0, "rope_scaling": {"type": "llama3", **LLAMA3}, "rope_parameters": None},
    ],
)
def test_rope_is_read_in_the_old_and_the_new_spelling(keys: dict[str, object]) -> None:
    rope = from_hf(BASE | keys, "config.json").layers[0].rope
    assert rope is not None
    assert (rope.theta, rope.kind) == (500000.0, "llama3")
    assert rope.parameters["low_freq_factor"] == 1.0
    assert rope.parameters["original_max_position_embeddings"] == 8192


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "GPT2LMHeadModel is not supported; supported are LlamaForCausalLM, .*Qwen3",
        ),
        ({"architectures": None}, "architectures .*must be a list"),
        ({"hidden_size": None}, "hidden_size .*must be a whole number"),
        ({"hidden_size": "64"}, "hidden_size is '64', but must be a whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
        ({"num_attention_heads": 5}, "num_attention_heads is 5, but must divide hidden_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3, but must divide num_attention_heads"),
        ({"head_dim": 15}, "head_dim is 15, but must be even"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0, but must be a number above 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"torch_dtype": "int8"}, "torch_dtype is 'int8', but must be one of float32"),
        ({"dtype": "float64"}, "dtype is 'float64'"),
        ({"eos_token_id": "2"}, "eos_token_id is '2'"),
        ({"eos_token_id": [1, -1]}, "eos_token_id"),
        ({"rope_scaling": {"type": "linear"}}, "must have factor, a number above 0, for the rope type linear"),
        ({"rope_parameters": {"rope_type": "proportional"}}, "only the rope types default, linear, dynamic"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "must have short_factor, a list of numbers"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "must have low_freq_factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "rope_parameters .*kinds of layer"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "part of the head"),
        ({"rope_theta": -1}, "rope_theta is -1"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear', but must be an object"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', but only 'silu', 'gelu_pytorch_tanh'"),
        ({"mlp_bias": "no"}, "mlp_bias is 'no'"),
        (QWEN2 | {"use_sliding_window": True, "layer_types": ["full_attention"]}, "layer_types .*a list of 2"),
        (QWEN2 | {"use_sliding_window": True, "layer_types": ["full_attention", "mamba"]}, "layer_types .*'mamba'"),
        (SMOLLM3 | {"no_rope_layers": [1]}, "no_rope_layers is .*a list of 2"),
        (MIXTRAL | {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, but must be at most .*8"),
        (MIXTRAL | {"num_local_experts": 0}, "num_local_experts is 0"),
        (GEMMA3 | {"use_bidirectional_attention": True}, "only causal attention"),
        (PHI3 | {"rope_parameters": {"partial_rotary_factor": 0.6}}, "an even number of dimensions"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised by 'awq'.*float32, bfloat16.*GGUF"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised by 'gptq'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised by 'fp8'"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantised by 'bitsandbytes'"),
    ],
)
def test_a_config_that_cannot_be_served_names_file_and_key(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^some/config.json: .*{message}"):
        from_hf(BASE | changes, "some/config.json")


def test_eos_ids_of_both_files_are_merged_in_order_without_duplicates(folder: Path) -> None:
    tiny_models.edit_config(folder, eos_token_id=[7, 2])
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 9, 7]}')
    assert load_model_config(folder).eos_token_ids == (7, 2, 9)
    (folder / "generation_config.json").unlink()
    assert load_model_config(folder).eos_token_ids == (7, 2)


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff"])
def test_a_config_that_is_no_json_object_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_model_config(tmp_path)


def test_a_missing_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        load_model_config(tmp_path)
