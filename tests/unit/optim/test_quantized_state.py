"""Test 8-bit codes: exact round trips, unbiased rounding, zeros and values that are not finite."""

import pytest
import torch
from torch import Tensor

from lightning_zero.optim.quantized_state import NONNEGATIVE, SIGNED, dequantize, pack, quantize, unpack

DTYPES = [SIGNED, NONNEGATIVE]


def every_code(dtype: torch.dtype) -> Tensor:
    codes = torch.arange(-127, 128) if dtype is SIGNED else torch.arange(256)
    return torch.nn.functional.pad(codes, (0, 256 - len(codes))).to(dtype).view(1, 256)


def noise(word: int) -> Tensor:
    return torch.full((1, 1), word, dtype=torch.int32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 3.3e-7, 1e-27, 7.77e20])
def test_values_of_codes_keep_their_codes(dtype: torch.dtype, scale: float) -> None:
    codes, scales = every_code(dtype), torch.tensor([[scale]])
    values = dequantize(codes, scales)
    for rounding in (None, noise(0), noise(1), noise(0x8000), noise(0xFFFF)):
        found = quantize(values, dtype, rounding)
        assert torch.equal(found[0], codes)
        assert torch.equal(found[1], scales)
    assert len(values.unique()) == (255 if dtype is SIGNED else 256)
    assert values.abs().max() == scales


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_to_the_nearest_is_off_by_a_sixteenth_at_most(dtype: torch.dtype) -> None:
    values = torch.logspace(-3, 0, 1000).repeat(3)[torch.randperm(3000, generator=torch.Generator().manual_seed(0))]
    values = values if dtype is NONNEGATIVE else values * torch.where(torch.arange(3000) % 2 == 0, 1, -1)
    found = unpack(*pack(values, dtype))
    assert ((found - values) / values).abs().max() <= 1 / 16


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_value_is_kept_on_average_over_all_noise(dtype: torch.dtype) -> None:
    values = torch.logspace(-4, 0, 256).view(1, 256)
    values = values if dtype is NONNEGATIVE else -values
    total = torch.zeros(1, 256, dtype=torch.float64)
    for word in range(0, 1 << 16, 16):
        total += dequantize(*quantize(values, dtype, noise(word)))
    torch.testing.assert_close(total * 16 / (1 << 16), values.double(), rtol=1e-4, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_stay_and_a_block_that_is_not_finite_is_nan(dtype: torch.dtype) -> None:
    values = torch.ones(4, 256)
    values[0, 3], values[1, 4], values[2] = torch.nan, torch.inf, 0
    for rounding in (None, torch.full((4, 1), 0xFFFF, dtype=torch.int32)):
        found = dequantize(*quantize(values, dtype, rounding))
        assert found[:2].isnan().all()
        assert torch.equal(found[2:], values[2:])


def test_a_positive_second_moment_does_not_become_zero() -> None:
    values = torch.full((1, 256), 1e-30)
    values[0, 0], values[0, 1] = 1.0, 0.0
    found = dequantize(*quantize(values, NONNEGATIVE, noise(0)))
    assert found[0, 1] == 0
    assert (found[0, 2:] > 0).all()
    assert (found[0, 2:] < 1e-10).all()


@pytest.mark.parametrize("numel", [1, 255, 256, 257, 1000])
def test_tensors_of_any_length_are_packed_by_blocks(numel: int) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    codes, scales = pack(values, SIGNED)
    assert codes.shape == values.shape
    assert len(scales) == -(-numel // 256)
    torch.testing.assert_close(unpack(codes, scales), values, rtol=1 / 16, atol=2**-16)
    again = pack(unpack(codes, scales), SIGNED)
    assert torch.equal(again[0], codes)
    assert torch.equal(again[1], scales)
