"""Adapters beside the weights against models with the adapter merged into them, in every condition of the engine."""

import contextlib
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.engine import Engine
from engine.errors import InvalidRequestError
from engine.llm import LLM
from engine.lora.cache import AdapterCache
from engine.lora.request import LoRARequest
from engine.model_runner import ModelRunner
from engine.sampling_params import SamplingParams
from kernels.quantized_weight import QuantizedWeight
from tests import reference, tiny_families, tiny_models
from tests.engine.build import OVERLAPPED, build_engine
from tests.fake_cuda import FakeCuda
from tests.kernels.weights import q8_0
from tests.scripted import LateRunner, drain
from tests.tiny_adapters import merge, write_adapter

NUM_TOKENS = 40
PROMPTS = [[5, 9, 300, 7, 42, 8, 17], [*range(40, 90)], [*range(200, 240)]]
CONDITIONS: dict[str, dict[str, object]] = {
    "plain": {},
    "chunked": {"max_num_batched_tokens": 11},
    "no prefix cache": {"enable_prefix_caching": False},
    "a pool that preempts": {"num_gpu_blocks_override": 9, "max_model_len": 120},
    "a pool that swaps": {"num_gpu_blocks_override": 9, "max_model_len": 120, "swap_space": 0.01},
    "one slot": {"max_loras": 1},
    **OVERLAPPED,
}


class Models:
    """The base, two adapters, and what each makes of the prompts: by the name of the adapter, None for the base."""

    def __init__(self, folder: Path) -> None:
        self.base = tiny_models.llama(folder / "base", seed=1)
        self.adapters = {
            "one": write_adapter(folder / "one", self.base, seed=1),
            "two": write_adapter(
                folder / "two", self.base, seed=3, targets=("q_proj", "v_proj", "down_proj"), rank=4,
                rank_pattern={"v_proj": 12}, alpha_pattern={"layers.1.self_attn.q_proj": 3}, use_rslora=True,
            ),
        }  # fmt: skip
        merged = {name: merge(folder / f"{name}-merged", self.base, path) for name, path in self.adapters.items()}
        self.merged = {None: self.base} | merged
        self.expected = {
            (name, i): reference.greedy(path, prompt, NUM_TOKENS)
            for name, path in self.merged.items()
            for i, prompt in enumerate(PROMPTS)
        }

    def request(self, name: str) -> LoRARequest:
        return LoRARequest(name, 1, str(self.adapters[name]))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return Models(tmp_path_factory.mktemp("lora"))


def lora_engine(path: Path, attention: str = "cpu", **settings: object) -> Engine:
    return build_engine(path, attention, **({"enable_lora": True} | settings))


def submit(
    engine: Engine, models: Models, name: str | None, i: int, request_id: str, max_tokens: int = NUM_TOKENS
) -> None:
    adapter = None if name is None else engine.load_adapter(models.request(name))
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    engine.add_request(request_id, PROMPTS[i], params, adapter=adapter)


@pytest.mark.parametrize("attention", ["cpu", "torch"])
@pytest.mark.parametrize("condition", CONDITIONS)
def test_a_mixed_batch_gives_what_each_merged_model_gives(models, condition, attention):
    engine = lora_engine(models.base, attention, **CONDITIONS[condition])
    if "late" in condition:
        engine.runner = LateRunner(engine.runner)
    for turn in range(2):  # the second finds the first one's blocks in the cache
        cases = {f"{name}/{i}/{turn}": (name, i) for name in (None, "one", "two") for i in range(len(PROMPTS))}
        for request_id, (name, i) in cases.items():
            submit(engine, models, name, i, request_id)
        tokens = drain(engine)
        assert {r: tokens[r] for r in cases} == {r: models.expected[case] for r, case in cases.items()}
    stats = engine.stats()
    assert stats.live_blocks == 0
    assert stats.adapter_loads == (2 if condition != "one slot" else stats.adapter_loads)
    if "preempts" in condition or "swaps" in condition:
        assert stats.preemptions
    if "plain" in condition:
        assert stats.cached_prompt_tokens >= 3 * 32 * 2
    engine.close()


def test_a_step_without_adapters_runs_no_adapter_code(models, monkeypatch):
    engine = lora_engine(models.base)

    def refuse(*_: object) -> None:
        raise AssertionError("a step without adapters came here")

    monkeypatch.setattr("engine.lora.layers.AdaptedLinear._adapted", refuse)
    monkeypatch.setattr("engine.lora.layers.ModelAdapters.begin", refuse)
    submit(engine, models, None, 0, "plain")
    assert drain(engine)["plain"] == models.expected[None, 0]
    engine.close()


def test_a_row_has_the_same_tokens_whatever_adapters_are_beside_it(models):
    """Also in int8, where a step with adapters takes the norm and the activation apart."""
    engine = lora_engine(models.base, quantization="int8", dtype="float32")
    alone = {}
    for name in (None, "one"):
        submit(engine, models, name, 1, str(name))
        alone |= drain(engine)
    engine.close()
    engine = lora_engine(models.base, quantization="int8", dtype="float32")
    for i, name in enumerate((None, "two", "one", None)):
        submit(engine, models, name, 1 if i < 3 else 2, f"{name}{i}")
    together = drain(engine)
    assert together["None0"] == alone["None"]
    assert together["one2"] == alone["one"]
    assert alone["one"] != alone["None"]
    engine.close()


def test_adapters_beside_exact_codes_of_a_quantised_checkpoint(models, tmp_path):
    """Weights of a Q8_0 file stay codes on a CPU (`kernels.quantized_weight.exact_codes`)."""
    base = tmp_path / "codes"
    shutil.copytree(models.base, base)
    weights = load_file(base / "model.safetensors")
    torch.manual_seed(0)
    for name, weight in weights.items():
        if weight.dim() == 2 and "layers" in name:
            weights[name] = q8_0(*weight.shape)
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    adapter = write_adapter(tmp_path / "adapter", base, seed=4)
    merged = merge(tmp_path / "merged", base, adapter)
    engine = lora_engine(base)
    assert isinstance(engine.runner.model.layers[0].attention.qkv.weight.data, QuantizedWeight)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    engine.add_request("a", PROMPTS[0], params, adapter=engine.load_adapter(LoRARequest("a", 1, str(adapter))))
    assert drain(engine)["a"] == reference.greedy(merged, PROMPTS[0], 12)
    engine.close()


def test_projections_that_are_stored_as_one_matrix(tmp_path):
    """Phi-3's adapters have one A for q, k and v."""
    base = tiny_families.write("phi3", tmp_path / "base")
    adapter = write_adapter(tmp_path / "adapter", base, targets=("qkv_proj", "o_proj", "gate_up_proj", "down_proj"))
    merged = merge(tmp_path / "merged", base, adapter)
    engine = lora_engine(base)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    engine.add_request("a", PROMPTS[0], params, adapter=engine.load_adapter(LoRARequest("a", 1, str(adapter))))
    assert drain(engine)["a"] == reference.greedy(merged, PROMPTS[0], 12)
    engine.close()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_graphs_serve_the_steps_without_adapters_and_the_others_go_without(models, asynchronous):
    plain, cuda = lora_engine(models.base).runner, FakeCuda()
    backend = plain.model.layers[0].attention.backend
    runner = ModelRunner(plain.model, backend, plain.info, dtype=plain.dtype, device=plain.device, cuda=cuda,
                         adapters=plain.adapters)  # fmt: skip
    runner.pad_decodes(capture=True)
    engine = Engine(runner, async_scheduling=asynchronous, adapters=AdapterCache(plain.info.read_adapter, 4))
    submit(engine, models, None, 0, "base")
    for _ in range(4):
        engine.step()
    replays = cuda.log.count("replay")
    assert replays
    submit(engine, models, "one", 1, "one")
    for _ in range(4):
        engine.step()
    assert cuda.log.count("replay") <= replays + 2 * asynchronous
    engine.abort("one")
    submit(engine, models, "two", 2, "two", 5)
    tokens = drain(engine)
    assert tokens["two"] == models.expected["two", 2][:5]
    assert tokens["base"] == models.expected[None, 0][-len(tokens["base"]) :]
    assert len(tokens["base"]) > 20
    assert cuda.log.count("replay") > replays + 2
    runner.close()


def test_a_failed_step_brings_adapters_to_the_device_again(models):
    """What a plan was to bring may not have arrived."""
    engine = lora_engine(models.base)
    submit(engine, models, "one", 0, "lost")
    launch, engine.runner.launch = engine.runner.launch, mock.Mock(side_effect=RuntimeError("made to fail"))
    assert [end.request_id for end in engine.step().finished] == ["lost"]
    engine.runner.launch = launch
    submit(engine, models, "one", 0, "again")
    assert drain(engine)["again"] == models.expected["one", 0]
    engine.close()


def test_a_slot_keeps_nothing_of_the_adapter_before(models, tmp_path):
    """Numbers so large that x A has no end, times the zeros beside a lower rank, would be none."""
    large = write_adapter(tmp_path / "large", models.base, seed=5, rank=16)
    tensors = load_file(large / "adapter_model.safetensors")
    tensors = {name: tensor * 1e38 if "lora_A" in name else tensor for name, tensor in tensors.items()}
    save_file(tensors, large / "adapter_model.safetensors")
    engine = lora_engine(models.base, max_loras=1)
    adapter = engine.load_adapter(LoRARequest("large", 1, str(large)))
    engine.add_request("large", PROMPTS[0], SamplingParams(temperature=0, max_tokens=2), adapter=adapter)
    drain(engine)
    submit(engine, models, "two", 0, "two")
    assert drain(engine)["two"] == models.expected["two", 0]
    engine.close()


def test_files_that_changed_under_a_name_reuse_no_kv(models, tmp_path):
    folder = tmp_path / "adapter"
    shutil.copytree(models.adapters["one"], folder)
    engine = lora_engine(models.base, max_loras=1)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    for name in ("one", "two"):
        for file in models.adapters[name].iterdir():
            shutil.copyfile(file, folder / file.name)
        adapter = engine.load_adapter(LoRARequest("same", 1, str(folder)))
        engine.add_request(name, PROMPTS[1], params, adapter=adapter)
        assert drain(engine)[name] == models.expected[name, 1]
    assert engine.stats().cached_prompt_tokens == 0
    engine.close()


def test_an_adapter_without_a_slot_waits_and_the_base_goes_on(models):
    engine = lora_engine(models.base, max_loras=1)
    for i, name in enumerate(("one", "two", "one", None)):
        submit(engine, models, name, 0, f"{name}{i}")
    began = []
    while engine.has_work():
        began += [r for r in engine.step().request_ids if r not in began]
    # The second request for the first adapter is behind the one that waits for the slot.
    assert began == ["one0", "None3", "two1", "one2"]
    engine.close()


def test_requests_of_the_batch_class_give_a_slot_up(models):
    engine = lora_engine(models.base, max_loras=1, max_num_seqs=2)
    one, two = (engine.load_adapter(models.request(name)) for name in ("one", "two"))
    long = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    for i in range(2):
        engine.add_request(f"batch{i}", PROMPTS[i], long, adapter=one, is_batch=True)
    for _ in range(3):
        engine.step()
    engine.add_request("two", PROMPTS[0], long, adapter=two)
    engine.add_request("base", PROMPTS[1], long)
    tokens = drain(engine)
    assert tokens["two"] == models.expected["two", 0]
    assert tokens["base"] == models.expected[None, 1]
    assert engine.stats().preemptions == 2
    engine.close()


def test_llm_takes_an_adapter_for_all_prompts_or_one_for_each(models):
    with contextlib.closing(LLM(models.base, enable_lora=True, device="cpu", dtype="float32",
                                num_gpu_blocks_override=64)) as llm:  # fmt: skip
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        one, two = models.request("one"), models.request("two")
        outputs = llm.generate(PROMPTS, params, use_tqdm=False, lora_request=[one, None, two])
        assert [o.outputs[0].token_ids for o in outputs] == [
            models.expected[case] for case in (("one", 0), (None, 1), ("two", 2))
        ]
        output = llm.generate(PROMPTS[:1], params, use_tqdm=False, lora_request=two)[0]
        assert output.outputs[0].token_ids == models.expected["two", 0]
        with pytest.raises(InvalidRequestError, match="lora_request has 1 entries for 3 prompts"):
            llm.generate(PROMPTS, params, lora_request=[one])
        with pytest.raises(InvalidRequestError, match="lora_request takes LoRARequest"):
            llm.generate(PROMPTS, params, lora_request="one")
        with pytest.raises(InvalidRequestError, match=r"prompts\[1\]: No adapter found"):
            llm.generate(PROMPTS, params, lora_request=[None, LoRARequest("x", 1, "/nowhere"), None])


def test_without_enable_lora_an_adapter_is_refused(models):
    engine = build_engine(models.base)
    with pytest.raises(InvalidRequestError, match="start it with enable_lora"):
        engine.load_adapter(models.request("one"))
    engine.close()
