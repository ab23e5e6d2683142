import torch

from kernels.zeros import lazy_zeros


def test_lazy_zeros_are_zeros_that_can_be_written() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        x = lazy_zeros((3, 5, 7), dtype, "cpu")
        assert x.shape == (3, 5, 7)
        assert x.dtype is dtype
        assert torch.equal(x, torch.zeros(3, 5, 7, dtype=dtype))
        x[1] = 1
        assert x.sum() == 35
        assert x.data_ptr() % 64 == 0


def test_lazy_zeros_of_nothing() -> None:
    assert lazy_zeros((0, 4), torch.float32, "cpu").shape == (0, 4)
