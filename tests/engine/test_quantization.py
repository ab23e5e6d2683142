"""A decoder whose matrices are in 8 bits, against the same decoder in float32."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from engine.errors import ConfigError
from engine.layers.linear import Quantization
from engine.layers.norm import RMSNorm
from engine.loader import load_weights
from engine.model_config import load_model_config
from engine.models.decoder import Decoder
from engine.sampling_params import SamplingParams
from kernels.attention import AttentionMetadata, select_backend
from kernels.linear import PackedWeight
from kernels.quantized_weight import QuantizedWeight
from tests import tiny_models
from tests.engine.build import build_engine
from tests.kernels.weights import q4_1
from tests.scripted import drain


@pytest.fixture(scope="module", params=["llama", "llama_tied", "qwen3", "biased"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("model")
    if request.param == "qwen3":
        return tiny_models.qwen3(root)
    overrides = {"llama": {}, "llama_tied": {"tie_word_embeddings": True}, "biased": {"attention_bias": True}}
    return tiny_models.llama(root, **overrides[request.param])


def decoder(folder: Path, quantization: Quantization | None) -> Decoder:
    config = load_model_config(folder)
    backend = select_backend("cpu", torch.float32, config.head_dim)
    device = torch.device("cpu")
    model = Decoder(config, backend, max_positions=64, dtype=torch.float32, device=device, quantization=quantization)
    load_weights(model.targets(), folder, config)
    return model


def logits_of(
    model: Decoder, tokens: Tensor, kv_dtype: torch.dtype | None = None, rows: Tensor | None = None
) -> Tensor:
    config, n = model.config, len(tokens)
    backend = select_backend("cpu", torch.float32, config.head_dim, kv_dtype=kv_dtype)
    shape = (4, 16, config.num_kv_heads, config.head_dim, torch.float32, "cpu")
    caches = [backend.kv_cache(*shape) for _ in range(config.num_layers)]
    metadata = AttentionMetadata(
        query_start=torch.tensor([0, n], dtype=torch.int32),
        seq_lens=torch.tensor([n], dtype=torch.int32),
        block_tables=torch.arange(4, dtype=torch.int32)[None],
        rows=torch.zeros(1, dtype=torch.int32),
        slots=torch.arange(n),
        max_query_len=n,
        max_seq_len=n,
    )
    return model.logits(model.forward(tokens, torch.arange(n), caches, metadata, rows))


def test_quantized_logits_stay_near(folder: Path) -> None:
    tokens = torch.randint(3, 380, (50,), generator=torch.Generator().manual_seed(0))
    expected, got = (logits_of(decoder(folder, quantization), tokens) for quantization in (None, "int8"))
    assert got.dtype is torch.float32
    error = (got - expected).norm() / expected.norm()
    # The random weights are large, so attention is sharp and magnifies. The lower bound: it is quantised at all.
    assert 1e-4 < error < 0.08


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("rows", [[], [49], [3, 20]])
def test_the_last_layer_computes_wanted_tokens_alone_to_the_same_bits(
    folder: Path, quantization: Quantization | None, rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = torch.randint(3, 380, (50,), generator=torch.Generator().manual_seed(0))
    model, wanted = decoder(folder, quantization), torch.tensor(rows, dtype=torch.int64)
    expected = logits_of(model, tokens)[wanted]
    seen = rows_seen(model, monkeypatch)
    assert torch.equal(logits_of(model, tokens, rows=wanted), expected)
    assert seen == [len(rows)]


def rows_seen(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows the last layer's MLP gets, call by call from now on."""
    seen: list[int] = []
    layer = model.layers[-1]
    mlp = layer.mlp

    def counted(norm: RMSNorm | None, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor | None]:
        seen.append(len(x))
        return mlp(norm, x, residual)

    monkeypatch.setattr(layer, "mlp", counted)
    return seen


def test_a_step_computes_its_last_layer_for_sampled_tokens_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build_engine(tiny_models.llama(tmp_path), max_num_batched_tokens=16)
    seen = rows_seen(engine.runner.model, monkeypatch)
    prompt = [5 + i for i in range(40)]
    engine.add_request("a", prompt, SamplingParams(temperature=0.0, max_tokens=2))
    drain(engine)
    assert seen == [0, 0, 1, 1]
    seen.clear()
    engine.add_request("b", prompt[::-1], SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1))
    drain(engine)
    assert seen == [16, 16, 8]


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8])
def test_logits_with_a_narrow_cache_are_within_three_percent(folder: Path, kv_dtype: torch.dtype) -> None:
    tokens = torch.randint(3, 380, (50,), generator=torch.Generator().manual_seed(0))
    model = decoder(folder, None)
    expected, got = logits_of(model, tokens), logits_of(model, tokens, kv_dtype)
    assert 1e-5 < (got - expected).norm() / expected.norm() < 0.03


def test_every_matrix_is_in_eight_bits_and_a_tied_one_is_held_once(folder: Path) -> None:
    model = decoder(folder, "int8")
    matrices = [model.embedding, model.head.weight]
    for layer in model.layers:
        parts = (layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down)
        matrices += [part.weight for part in parts]
    assert all(isinstance(matrix, QuantizedWeight) for matrix in matrices)
    assert (model.embedding is model.head.weight) == model.config.tie_word_embeddings


def test_without_quantization_nothing_is_rounded(folder: Path) -> None:
    model = decoder(folder, None)
    assert isinstance(model.embedding, Tensor)
    packed = model.layers[0].mlp.down.weight
    assert isinstance(packed, PackedWeight)
    stored = load_file(folder / "model.safetensors")
    assert torch.equal(packed.unpack(), stored["model.layers.0.mlp.down_proj.weight"])
    fused = model.layers[0].mlp.gate_up.weight
    assert isinstance(fused, PackedWeight)
    parts = [stored[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    assert torch.equal(fused.unpack(), torch.cat(parts))


@pytest.mark.parametrize("tied", [False, True])
def test_weights_kept_as_codes_give_the_logits_of_float32(
    tmp_path: Path, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_model_config(tiny_models.llama(tmp_path / "tiny", tie_word_embeddings=tied))
    backend = select_backend("cpu", torch.float32, config.head_dim)

    def made() -> Decoder:
        torch.manual_seed(0)
        model = Decoder(config, backend, max_positions=64, dtype=torch.float32, device=torch.device("cpu"))
        for name, target in model.targets().items():
            target.copy_(torch.ones(target.shape) if "norm" in name else q4_1(*target.shape) * 8)
        return model

    coded = made()
    monkeypatch.setattr("kernels.linear.exact_codes", lambda *parts, gated: None)
    monkeypatch.setattr("engine.models.decoder.exact_codes", lambda *parts: None)
    wide = made()
    assert isinstance(coded.embedding, QuantizedWeight)
    assert isinstance(wide.embedding, Tensor)
    assert all(isinstance(layer.mlp.down.weight.data, QuantizedWeight) for layer in coded.layers)
    tokens = torch.randint(3, 380, (50,), generator=torch.Generator().manual_seed(0))
    assert torch.equal(logits_of(coded, tokens), logits_of(wide, tokens))


@pytest.mark.parametrize(
    "settings", [{"quantization": "int8"}, {"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "bfloat16"}]
)
def test_the_same_tokens_in_any_batch_and_chunk(tmp_path: Path, settings: dict[str, str]) -> None:
    folder = tiny_models.llama(tmp_path / "tiny")
    prompts = [[(3 + 5 * i + 11 * j) % 380 + 3 for j in range(length)] for i, length in enumerate((1, 16, 33))]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    alone = build_engine(folder, **settings)
    expected = {}
    for i, prompt in enumerate(prompts):
        alone.add_request(str(i), prompt, params)
        expected |= drain(alone)
    together = build_engine(folder, max_num_batched_tokens=16, async_scheduling=True, **settings)
    for i, prompt in enumerate(prompts):
        together.add_request(str(i), prompt, params)
    assert drain(together) == expected


def test_an_answer_taken_up_in_its_middle_goes_on_with_the_same_tokens(tmp_path: Path) -> None:
    """Of a long one, drawn at random, so that the smallest difference of a logit would show."""
    folder = tiny_models.llama(tmp_path / "tiny", max_position_embeddings=1024)
    settings = {"dtype": "auto", "max_model_len": 1024}
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=900, ignore_eos=True)
    prompt = [(3 + 11 * j) % 380 + 3 for j in range(40)]
    engine = build_engine(folder, **settings)
    assert "int8" in engine.info.dtype
    engine.add_request("whole", prompt, params)
    expected = drain(engine)["whole"]
    for known in (100, 480, 700):
        other = build_engine(folder, **settings)
        other.add_request("rest", prompt, params, output_ids=expected[:known])
        assert drain(other)["rest"] == expected[known:]


def test_a_smaller_cache_type_makes_more_blocks_of_the_same_memory(tmp_path: Path) -> None:
    folder = tiny_models.llama(tmp_path / "tiny")
    blocks = {
        name: build_engine(folder, kv_cache_memory_bytes=1 << 20, kv_cache_dtype=name).info.num_blocks
        for name in ("float32", "bfloat16", "int8")
    }
    assert blocks["bfloat16"] == 2 * blocks["float32"]
    assert blocks["int8"] > 1.5 * blocks["bfloat16"]


def test_int8_is_refused_where_it_would_only_be_slow(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="quantization int8 is for a CPU"):
        build_engine(tiny_models.llama(tmp_path / "tiny"), quantization="int8", dtype="bfloat16")
