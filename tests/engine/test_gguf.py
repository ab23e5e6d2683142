import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file as load_numpy
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from engine.errors import ConfigError
from engine.export import export_hf_folder
from engine.gguf.config import hf_config, llama3_factors
from engine.gguf.file import GGUFError, open_gguf
from engine.hub import resolve_model
from engine.loader import LoadError, iter_weights, load_weights
from engine.model_config import load_model_config
from engine.sampling_params import SamplingParams
from engine.text.tokenizer import load_tokenizer
from tests import tiny_models
from tests.engine.build import build_engine
from tests.engine.test_exactness import logits_of
from tests.scripted import drain
from tests.tiny_gguf import write_gguf

ROOT = Path(__file__).parents[2]
F32, Q8_0 = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.Q8_0
KINDS = [F32, gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.BF16, Q8_0, gguf.GGMLQuantizationType.Q4_1]
MAKERS = {"llama": tiny_models.llama, "qwen3": tiny_models.qwen3}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: make(tmp_path_factory.mktemp(name)) for name, make in MAKERS.items()}


@pytest.fixture(scope="module")
def default_model() -> Path:
    return resolve_model("smollm2-135m")


def hf_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()


# ---- against safetensors


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", MAKERS)
def test_a_gguf_gives_the_weights_of_the_folder_it_was_made_from(
    name: str, kind: gguf.GGMLQuantizationType, folders: dict[str, Path], tmp_path: Path
) -> None:
    file = write_gguf(folders[name], tmp_path / "m.gguf", kind)
    found = dict(iter_weights(file))
    expected = load_numpy(folders[name] / "model.safetensors")
    assert found.keys() == expected.keys()
    for parameter, weight in expected.items():
        values = weight if weight.ndim == 1 else gguf.dequantize(gguf.quantize(weight, kind), kind)
        assert found[parameter].dtype == torch.float32
        assert np.array_equal(found[parameter].numpy(), values.reshape(weight.shape)), parameter


def test_q_and_k_biases_are_permuted_like_their_weights(tmp_path: Path) -> None:
    folder = tiny_models.llama(tmp_path / "folder", attention_bias=True)
    file = write_gguf(folder, tmp_path / "m.gguf")
    assert load_model_config(file).qkv_bias
    found = dict(iter_weights(file))
    for name, weight in load_file(folder / "model.safetensors").items():
        assert torch.equal(found[name], weight), name


@pytest.mark.parametrize("name", MAKERS)
def test_a_gguf_gives_the_config_of_the_folder_it_was_made_from(
    name: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    file = write_gguf(folders[name], tmp_path / "m.gguf")
    assert load_model_config(file) == load_model_config(folders[name])


def test_eos_ids_of_text_turn_and_message_are_merged(folders: dict[str, Path], tmp_path: Path) -> None:
    extra = {"tokenizer.ggml.eot_token_id": 2, "tokenizer.ggml.eom_token_id": 5}
    file = write_gguf(folders["llama"], tmp_path / "m.gguf", metadata=extra)
    assert load_model_config(file).eos_token_ids == (2, 5)
    assert load_tokenizer(file).eos_token_ids == (2, 5)


def test_the_tokenizer_of_a_gguf_is_that_of_the_folder_it_was_made_from(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    ours, theirs = load_tokenizer(write_gguf(folders["llama"], tmp_path / "m.gguf")), load_tokenizer(folders["llama"])
    text = "The quick  brown fox<|im_end|>\n 1234 naïve 日本 {'a': 1}"
    assert ours.encode(text) == theirs.encode(text)
    assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))
    assert (ours.vocab_size, ours.bos_token_id, ours.eos_token_ids) == (384, 1, (2,))
    assert ours.special_ids == theirs.special_ids == frozenset({0, 1, 2})
    assert ours.chat_template == theirs.chat_template
    assert ours.token_bytes == theirs.token_bytes


# ---- scaled rotary embeddings


def test_llama_3_factors_give_back_the_parameters_they_come_from(folders: dict[str, Path], tmp_path: Path) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, head_dim=16, rope_parameters=parameters)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1.0 / 10000.0 ** (torch.arange(0, 16, 2, dtype=torch.float32) / 16)
    factors = (plain / scaled).numpy()
    assert np.allclose(factors, llama3_factors(10000.0, 16, 32.0), rtol=1e-5)

    file = write_gguf(folders["llama"], tmp_path / "m.gguf", tensors={"rope_freqs.weight": factors})
    rope = load_model_config(file).layers[0].rope
    assert rope is not None
    assert rope.kind == "llama3"
    assert {"rope_theta": rope.theta, **rope.parameters} == parameters
    assert "rope_freqs.weight" not in dict(iter_weights(file))


def test_other_rope_factors_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    factors = np.linspace(1.0, 8.0, 8, dtype=np.float32)
    file = write_gguf(folders["llama"], tmp_path / "m.gguf", tensors={"rope_freqs.weight": factors})
    with pytest.raises(ConfigError, match=r"rope_freqs\.weight are not those of Llama 3"):
        load_model_config(file)


# ---- errors


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.expert_count": 8}, "expert_used_count is None, but must be a whole number"),
        ({"llama.attention.key_length": 32}, "rotary embeddings over 16 of 32"),
        ({"llama.attention.value_length": 32}, "values of another length"),
        ({"llama.rope.scaling.type": "odd"}, "only the rope types default, linear"),
        ({"split.count": 2}, "one of 2 parts"),
    ],
)
def test_a_gguf_of_a_kind_that_is_not_supported_is_refused(
    metadata: dict[str, Any], message: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    file = write_gguf(folders["llama"], tmp_path / "m.gguf", metadata=metadata)
    with pytest.raises(ConfigError, match=rf"m\.gguf.*{message}"):
        load_model_config(file)


def test_an_architecture_that_is_not_supported_is_named_with_those_that_are(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "falcon")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    for read in (load_model_config, lambda path: list(iter_weights(path))):
        with pytest.raises(ConfigError, match="'falcon' is not supported; supported are llama, qwen2, qwen3, "):
            read(tmp_path / "m.gguf")


def test_a_splitting_rule_that_is_not_known_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    file = write_gguf(folders["llama"], tmp_path / "m.gguf", pre="deepseek-coder")
    with pytest.raises(ConfigError, match=r"'deepseek-coder'.*smollm.*llama-bpe.*qwen2"):
        load_tokenizer(file)


def test_a_tensor_that_no_model_has_is_unexpected_under_its_own_name(folders: dict[str, Path], tmp_path: Path) -> None:
    file = write_gguf(folders["llama"], tmp_path / "m.gguf", tensors={"blk.0.odd.weight": np.ones(8, np.float32)})
    weights = load_file(folders["llama"] / "model.safetensors")
    with pytest.raises(LoadError, match=r"unexpected blk\.0\.odd\.weight"):
        load_weights(weights, file, load_model_config(file))


def test_a_truncated_file_is_refused_wherever_it_ends(folders: dict[str, Path], tmp_path: Path) -> None:
    whole = write_gguf(folders["llama"], tmp_path / "whole.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in (0, 3, 4, 20, 500, 5000, 20_000, len(whole) // 2, len(whole) - 500):
        cut.write_bytes(whole[:size])
        with pytest.raises(LoadError, match=r"cut\.gguf"):
            list(iter_weights(cut))


def test_damaged_headers_raise_nothing_but_config_errors(folders: dict[str, Path], tmp_path: Path) -> None:
    whole = bytearray(write_gguf(folders["llama"], tmp_path / "whole.gguf").read_bytes())
    file = tmp_path / "damaged.gguf"
    generator = np.random.default_rng(0)
    header = open_gguf(tmp_path / "whole.gguf").tensors["output.weight"].offset
    refused = 0
    for i in range(300):
        damaged = bytearray(whole[: header + 4096])
        for at in generator.integers(4, 700 if i % 2 else header, 8):
            damaged[at] = generator.integers(0, 256)
        file.write_bytes(damaged)
        try:
            load_model_config(file)
        except ConfigError:
            refused += 1
    assert refused > 100


def test_a_count_beyond_the_file_is_refused_at_once(tmp_path: Path) -> None:
    header = b"GGUF" + struct.pack("<IQQ", 3, 2**60, 1) + struct.pack("<Q1sIIQ", 1, b"k", 9, 4, 2**61)
    (tmp_path / "m.gguf").write_bytes(header)
    with pytest.raises(GGUFError, match="truncated or corrupt"):
        open_gguf(tmp_path / "m.gguf")


# ---- against transformers and the gguf package


@pytest.mark.parametrize("name", MAKERS)
def test_a_header_is_what_the_gguf_package_reads(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for i, kind in enumerate(("u", "")):
        for bits in (8, 16, 32, 64):
            getattr(writer, f"add_{kind}int{bits}")(f"k.{kind}{bits}", (2 ** (bits - 1) - 1) * (1 if i == 0 else -1))
    writer.add_float32("k.f32", 1.5)
    writer.add_float64("k.f64", -1e300)
    writer.add_bool("k.bool", True)
    writer.add_string("k.text", "naïve 日本")
    writer.add_array("k.numbers", [1, -2, 3])
    writer.add_array("k.texts", ["", "a", "ü"])
    writer.add_custom_alignment(64)
    writer.add_tensor("a.weight", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("b.weight", np.arange(4, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    for file in (path, write_gguf(folders[name], tmp_path / "model.gguf", Q8_0)):
        reader, ours = gguf.GGUFReader(file), open_gguf(file)
        fields = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
        assert ours.metadata == fields
        places = {t.name: (tuple(t.shape.tolist()[::-1]), int(t.tensor_type), t.data_offset) for t in reader.tensors}
        assert {t.name: (t.shape, t.kind, t.offset) for t in ours.tensors.values()} == places


@pytest.fixture(scope="module")
def by_transformers(default_model: Path) -> tuple[LlamaForCausalLM, dict[str, torch.Tensor]]:
    """The default model as transformers reads its file, and its tensors by their names in that."""
    with torch.device("meta"):
        names = LlamaForCausalLM(LlamaConfig(**hf_config(default_model)))
    read = load_gguf_checkpoint(default_model, return_tensors=True, model_to_load=names)
    tensors = read["tensors"]
    model = LlamaForCausalLM(LlamaConfig(**read["config"])).eval()
    model.load_state_dict(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}, assign=True)
    return model, tensors


def test_the_engine_gives_the_default_model_s_logits_as_transformers_does(
    default_model: Path, by_transformers: tuple[LlamaForCausalLM, dict[str, torch.Tensor]]
) -> None:
    tokenizer = load_tokenizer(default_model)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}])
    engine = build_engine(default_model, max_model_len=256, kv_cache_memory_bytes=1 << 27)
    seen = logits_of(engine)
    engine.add_request("a", prompt, SamplingParams(temperature=0.0, max_tokens=16))
    tokens = drain(engine)["a"]
    engine.close()
    with torch.inference_mode():
        truth = by_transformers[0](torch.tensor([[*prompt, *tokens]])).logits[0]
    for i, row in enumerate(seen):
        torch.testing.assert_close(row, truth[len(prompt) - 1 + i], atol=5e-4, rtol=0)
    assert len(seen) == len(tokens)
    assert "Paris" in tokenizer.decode(tokens)


def test_the_default_model_has_the_weights_config_and_logits_that_transformers_reads(
    default_model: Path, by_transformers: tuple[LlamaForCausalLM, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    reference, expected = by_transformers
    seen = set()
    for name, weight in iter_weights(default_model):
        assert torch.equal(weight, expected[name]), name
        seen.add(name)
    assert seen == expected.keys()

    config = load_model_config(default_model)
    theirs = reference.config
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (30, 9, 3)
    assert config.head_dim == theirs.head_dim
    assert config.layers[0].rope.theta == theirs.rope_parameters["rope_theta"] == 100000.0
    assert config.tie_word_embeddings
    assert config.eos_token_ids == (2,)

    export_hf_folder(default_model, tmp_path / "hf")
    exported = hf_model(tmp_path / "hf")
    ids = torch.tensor([load_tokenizer(default_model).encode("The capital of France is")])
    with torch.no_grad():
        assert torch.equal(exported(ids).logits, reference(ids).logits)
    assert load_model_config(tmp_path / "hf") == config
    assert exported.generation_config.eos_token_id in (2, [2])


# ---- export


@pytest.mark.parametrize("name", MAKERS)
def test_an_exported_folder_is_the_same_model_to_transformers(
    name: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    sharded = MAKERS[name](tmp_path / "sharded", shards=3)
    gguf_file = write_gguf(folders[name], tmp_path / "m.gguf")
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        expected = hf_model(folders[name])(ids).logits
        for source in (sharded, gguf_file):
            out = tmp_path / f"out-{source.name}"
            export_hf_folder(source, out)
            assert torch.equal(hf_model(out)(ids).logits, expected)
            text = "The quick brown fox<|im_end|> 12"
            assert AutoTokenizer.from_pretrained(out)(text).input_ids == load_tokenizer(source).encode(text)
            assert load_model_config(out) == load_model_config(source)


def test_export_from_the_command_line_refuses_a_folder_that_is_not_empty(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "kept").write_text("")
    command = [sys.executable, "-m", "engine.export", str(folders["llama"]), str(tmp_path)]
    child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert child.returncode == 2
    assert "is not empty: give a new folder" in child.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["kept"]
