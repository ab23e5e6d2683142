"""Which attention backend, tiles and splits a card gets: by table, with no card."""

import sys

import pytest
import torch

from kernels.attention import select
from kernels.attention.backend import FP8
from kernels.attention.flash_backend import Flash2Backend, Flash3Backend
from kernels.attention.select import select_backend, select_gpu_backend
from kernels.attention.triton_backend import TritonBackend
from kernels.gpu import Gpu
from kernels.gpu.attention_tiles import MAX_SPLITS, choose_splits, choose_tiles

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ALL = {"triton", "flash_attn", "flash_attn_interface"}


@pytest.mark.parametrize(
    ("capability", "packages", "dtype", "head_dim", "block_size", "kv_dtype", "chosen"),
    [
        ((9, 0), {"triton"}, BF16, 128, 0, None, "triton"),
        ((9, 0), ALL, BF16, 128, 0, None, "flash-attn-3"),
        ((9, 0), ALL, BF16, 128, 256, None, "flash-attn-3"),
        ((9, 0), ALL, BF16, 128, 24, None, "torch"),
        ((9, 0), ALL, BF16, 128, 0, FP8, "triton"),
        ((9, 0), ALL, BF16, 128, 0, torch.int8, "triton"),
        ((9, 0), ALL, FP32, 128, 0, None, "triton"),
        ((10, 0), ALL, BF16, 128, 0, None, "triton"),
        ((10, 0), ALL, BF16, 128, 512, None, "flash-attn"),
        ((8, 9), ALL, FP16, 96, 256, FP16, "flash-attn"),
        ((8, 9), ALL, FP16, 96, 16, None, "triton"),
        ((8, 9), ALL, FP16, 96, 0, None, "triton"),
        ((8, 6), {"triton"}, FP16, 128, 256, None, "triton"),
        ((7, 5), ALL, FP16, 128, 256, None, "triton"),
        ((7, 5), ALL, FP16, 128, 0, FP8, "triton"),
        ((7, 0), ALL, FP16, 128, 0, None, "torch"),
        ((8, 0), ALL, BF16, 320, 0, None, "torch"),
        ((8, 0), ALL, BF16, 72, 0, None, "torch"),
        ((8, 0), {"flash_attn"}, BF16, 128, 256, None, "torch"),
        ((12, 0), ALL, torch.float64, 128, 0, None, "torch"),
    ],
)
def test_backend_by_card_packages_and_model(capability, packages, dtype, head_dim, block_size, kv_dtype, chosen):
    backend = select_gpu_backend(Gpu(capability, 100), packages, dtype, head_dim, block_size, kv_dtype)
    assert backend.name == chosen
    assert backend.kv_dtype is kv_dtype
    assert backend.supports_block_size(block_size or backend.default_block_size)
    assert backend.reason


def test_a_gpu_is_asked_what_it_is(monkeypatch):
    monkeypatch.setattr(select, "describe", lambda device: Gpu((8, 9), 58))
    monkeypatch.setattr(select, "installed", lambda: {"triton"})
    backend = select_backend("cuda", BF16, 128)
    assert isinstance(backend, TritonBackend)
    assert backend.gpu.multiprocessors == 58
    assert "8.9" in backend.reason


def test_a_package_that_breaks_on_import_is_passed_over_with_a_word(monkeypatch, caplog):
    def broken(name):
        if name == "flash_attn":
            raise ImportError("undefined symbol: _ZN3c10")
        if name == "flash_attn_interface":
            raise ModuleNotFoundError(name)
        return sys.modules[__name__]

    monkeypatch.setattr(select.importlib, "import_module", broken)
    select.installed.cache_clear()
    try:
        assert select.installed() == {"triton"}
    finally:
        select.installed.cache_clear()
    assert "undefined symbol" in caplog.text
    assert "flash_attn_interface" not in caplog.text


def test_caches_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="multiples of 16"):
        TritonBackend(gpu=Gpu((9, 0), 132)).kv_cache(2, 24, 1, 64, BF16, "cpu")
    with pytest.raises(ValueError, match="multiple of 256"):
        Flash2Backend().kv_cache(2, 16, 1, 64, BF16, "cpu")
    with pytest.raises(ValueError, match="the model's type"):
        Flash3Backend(kv_dtype=torch.int8).kv_cache(2, 16, 1, 64, BF16, "cpu")


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (12, 0)])
@pytest.mark.parametrize("group", [1, 3, 7, 16, 64])
@pytest.mark.parametrize("queries", [1, 4, 500])
@pytest.mark.parametrize(("head_dim", "stored"), [(64, BF16), (96, FP8), (256, torch.int8)])
def test_a_tile_has_room_for_a_group_and_a_shape_for_tensor_cores(capability, group, queries, head_dim, stored):
    tiles = choose_tiles(Gpu(capability, 100), head_dim, group, queries, BF16, stored)
    assert tiles.block_m >= max(16, group)
    assert tiles.block_n >= 16
    assert tiles.decode == (queries == 1)


def test_splits_fill_the_card_and_no_more():
    h200 = Gpu((9, 0), 132)
    assert choose_splits(h200, 256 * 8, 800) == 1  # enough programs already
    assert choose_splits(h200, 8, 200) == 1  # too short to share
    assert choose_splits(h200, 8, 2048) == 16  # 128 keys each
    assert choose_splits(h200, 8, 100_000) == MAX_SPLITS
    assert choose_splits(h200, 64, 100_000) == 8  # 512 programs for 132 multiprocessors
