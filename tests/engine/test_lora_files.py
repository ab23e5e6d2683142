"""What an adapter's folder may hold, what is refused and how it is told; what is kept of it on the host."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import InvalidRequestError
from engine.lora.adapter import Adapter
from engine.lora.cache import AdapterCache
from engine.lora.peft import PeftConfig, parse_config
from engine.lora.request import AdapterError, LoRARequest
from engine.lora.slots import AdapterSlots
from tests import tiny_models
from tests.engine.build import build_engine
from tests.tiny_adapters import write_adapter


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_models.llama(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def engine(base):
    engine = build_engine(base, enable_lora=True, max_lora_rank=8)
    yield engine
    engine.close()


def load(engine, folder):
    return engine.load_adapter(LoRARequest("name", 1, str(folder)))


def edit(folder, **changes):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True}, r"DoRA \(use_dora\) cannot be served"),
        ({"bias": "lora_only"}, r"trained biases \(bias\)"),
        ({"modules_to_save": ["lm_head"]}, r"whole modules .*\(modules_to_save\)"),
        ({"lora_bias": True}, "lora_bias"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3', but only LORA"),
        ({"r": 0}, "ranks are whole numbers above 0.* it has 0"),
        ({"lora_alpha": "x"}, "it has 'x'"),
        ({"alpha_pattern": {"q_proj": -1}}, "it has -1"),
        ({"lora_alpha": 10**400}, "at most 1e.30; it has 1000"),
        ({"alpha_pattern": {"q_proj": 10**400}}, "at most 1e.30; it has 1000"),
        ({"rank_pattern": {"(": 4}}, "rank_pattern and alpha_pattern give numbers"),
        ({"r": 4}, r"q_proj have the shapes \[8, 64\] and \[64, 8\], but rank 4 and this model make them \[4, 64\]"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused_by_what_it_asks_for(base, engine, tmp_path, changes, message):
    edit(write_adapter(tmp_path, base, targets=["q_proj"]), **changes)
    with pytest.raises(AdapterError, match=message) as caught:
        load(engine, tmp_path)
    assert not caught.value.is_missing


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("base_model.model.lm_head.lora_A.weight", "an adapter of lm_head cannot be served; those of down_proj, gate"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", "low-rank embeddings cannot be served"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector.weight", "DoRA cannot be served"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_B.bias", "biases cannot be served"),
        ("base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight", "an adapter of model.layers.9.self_attn"),
        ("base_model.model.lm_head.weight", "lm_head.weight is no lora_A.weight"),
    ],
)
def test_a_tensor_that_has_no_place_is_refused_by_name(base, engine, tmp_path, name, message):
    write_adapter(tmp_path, base, targets=["q_proj"])
    tensors = load_file(tmp_path / "adapter_model.safetensors") | {name: torch.zeros(8, 64)}
    if "lora_A.weight" in name:
        tensors[name.replace("lora_A", "lora_B")] = torch.zeros(64, 8)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match=message):
        load(engine, tmp_path)


def test_half_a_pair_is_refused(base, engine, tmp_path):
    write_adapter(tmp_path, base, targets=["q_proj"])
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    del tensors["base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"]
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match=r"layers.1.self_attn.q_proj has lora_B.weight missing"):
        load(engine, tmp_path)


def test_a_rank_above_the_limit_names_the_setting(base, engine, tmp_path):
    write_adapter(tmp_path, base, targets=["q_proj"], rank_pattern={"q_proj": 9})
    with pytest.raises(AdapterError, match=r"q_proj has rank 9, above max_lora_rank, which is 8: .*max_lora_rank=9 "):
        load(engine, tmp_path)
    write_adapter(tmp_path, base, targets=["q_proj", "k_proj"], rank_pattern={"q_proj": 9, "k_proj": 12})
    with pytest.raises(AdapterError, match="max_lora_rank=12 "):
        load(engine, tmp_path)


def test_an_adapter_of_another_model_is_refused(engine, tmp_path):
    other = tiny_models.llama(tmp_path / "other", hidden_size=96)
    write_adapter(tmp_path / "adapter", other, targets=["q_proj"])
    with pytest.raises(AdapterError, match=r"but rank 8 and this model make them \[8, 64\]"):
        load(engine, tmp_path / "adapter")


def test_what_is_not_there_is_missing(base, engine, tmp_path):
    for folder in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(AdapterError, match="No adapter found") as caught:
            load(engine, folder)
        assert caught.value.is_missing
    write_adapter(tmp_path, base, targets=["q_proj"])
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(AdapterError, match=r"has no adapter_model.safetensors"):
        load(engine, tmp_path)


@pytest.mark.parametrize("path", ["/a\0b", "/a\ud800b", "/" + "a" * 300, "/" + "a/" * 3000])
def test_a_path_that_no_file_can_have_is_missing(engine, path):
    with pytest.raises(AdapterError, match="is no folder where the engine runs") as caught:
        load(engine, path)
    assert caught.value.is_missing


@pytest.mark.parametrize(("which", "value"), [("lora_A", float("nan")), ("lora_B", float("inf")), ("lora_B", 3e38)])
def test_numbers_that_are_not_finite_are_refused(base, engine, tmp_path, which, value):
    write_adapter(tmp_path, base, targets=["q_proj"])
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors[f"base_model.model.model.layers.1.self_attn.q_proj.{which}.weight"][3, 5] = value  # scaled: times two
    save_file(tensors, file)
    with pytest.raises(AdapterError, match=r"of model.layers.1.self_attn.q_proj has numbers that are not finite in fl"):
        load(engine, tmp_path)


def test_a_matrix_under_two_names_is_refused(base, engine, tmp_path):
    write_adapter(tmp_path, base, targets=["q_proj"])
    file = tmp_path / "adapter_model.safetensors"
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.other.weight"
    save_file(load_file(file) | {name: torch.zeros(8, 64)}, file)
    with pytest.raises(AdapterError, match=r"layers.0.self_attn.q_proj has lora_A twice"):
        load(engine, tmp_path)


def test_a_pickle_and_a_damaged_file_are_refused(base, engine, tmp_path):
    write_adapter(tmp_path, base, targets=["q_proj"])
    file = tmp_path / "adapter_model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-10])
    with pytest.raises(AdapterError, match="truncated or corrupt"):
        load(engine, tmp_path)
    for text in ("{", "[" * 100_000):
        (tmp_path / "adapter_config.json").write_text(text)
        with pytest.raises(AdapterError, match=r"adapter_config.json is no JSON"):
            load(engine, tmp_path)
    file.unlink()
    (tmp_path / "adapter_model.bin").write_bytes(data)
    with pytest.raises(AdapterError, match=r"as a pickle \(adapter_model.bin\)"):
        load(engine, tmp_path)


def test_scales_by_module():
    config = PeftConfig(8, 16.0, {"layers.1.self_attn.q_proj": 4}, {"v_proj": 1.0}, use_rslora=False)
    assert config.scale_of("model.layers.0.self_attn.q_proj") == 2.0
    assert config.scale_of("model.layers.1.self_attn.q_proj") == 4.0
    assert config.scale_of("model.layers.11.self_attn.q_proj") == 2.0
    assert config.scale_of("model.layers.0.self_attn.v_proj") == 1 / 8
    text = json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 6, "use_rslora": True}).encode()
    assert parse_config(text, "here").scale_of("q_proj") == 3.0


@pytest.mark.parametrize("bad", [("", 1, "p"), ("n", 0, "p"), ("n", 1, ""), ("n", True, "p"), (3, 1, "p")])
def test_a_request_without_name_number_or_path_is_refused(bad):
    with pytest.raises(InvalidRequestError, match="lora_"):
        LoRARequest(*bad)


def adapter(digest):
    return Adapter(digest, {})


def test_slots_go_to_those_who_need_them_from_the_least_recently_used():
    slots = AdapterSlots(2)
    a, b, c = (adapter(name) for name in "abc")
    assert (slots.take(a), slots.take(b)) == (0, 1)
    assert slots.loads() == ((0, a), (1, b))
    assert not slots.has_room(c)
    assert slots.has_room(a)
    slots.give_back(b)
    slots.give_back(a)
    assert slots.take(b) == 1
    assert slots.loads() == ()
    slots.give_back(b)
    assert slots.take(c) == 0  # a was used longer ago
    assert slots.loads() == ((0, c),)
    assert slots.take(a) == 1
    assert not slots.has_room(b)
    assert slots.num_loads == 4


def test_a_slot_is_free_when_its_last_user_gives_it_back():
    slots = AdapterSlots(1)
    a, b = adapter("a"), adapter("b")
    assert slots.take(a) == slots.take(adapter("a")) == 0
    slots.give_back(a)
    assert not slots.has_room(b)
    slots.give_back(a)
    assert slots.take(b) == 0
    slots.give_back(b)
    slots.forget()
    assert slots.take(b) == 0
    assert slots.num_loads == 3


def test_the_host_reads_files_once_and_keeps_so_many(base, tmp_path):
    read = []

    def reader(folder):
        read.append(folder.name)
        return adapter(f"{folder.name}{(folder / 'adapter_config.json').read_text()[-9:]}")

    folders = {name: write_adapter(tmp_path / name, base, targets=["q_proj"]) for name in "abc"}
    cache = AdapterCache(reader, 2)
    first = cache.get(LoRARequest("a", 1, str(folders["a"])))
    assert cache.get(LoRARequest("other name", 1, str(folders["a"]))) is first
    for name in "bca":
        cache.get(LoRARequest(name, 1, str(folders[name])))
    assert read == ["a", "b", "c", "a"]
    assert cache.get(LoRARequest("a", 1, "/gone", digest=first.digest)).digest == first.digest
    edit(folders["a"], more="other")
    assert cache.get(LoRARequest("a", 1, str(folders["a"]))).digest != first.digest
    with pytest.raises(AdapterError, match="are not those that were loaded as 'b'"):
        cache.get(LoRARequest("b", 1, str(folders["b"]), digest="of another"))


def test_any_number_of_names_of_folders_is_not_remembered(tmp_path):
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_text("")
    cache = AdapterCache(lambda folder: adapter("same"), 2)
    for i in range(300):
        cache.get(LoRARequest("a", 1, f"{tmp_path}{'/.' * i}"))
    assert len(cache._digests) <= 64
