"""Packed frozen weights: the values by their definition, the error of each block, and the same bytes once more."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_zero.sharding import weight_format
from lightning_zero.sharding.weight_format import (
    BLOCK,
    DEQUANTIZE,
    LEVELS,
    NF4,
    SUPERBLOCK,
    WeightFormat,
    largest_value,
    packed_words,
)

SHAPES = [(1, 1), (3, 7), (64, 64), (33, 65), (300, 200)]
KINDS: tuple[Any, ...] = ("nf4", "int8")


def run(op: Any, *args: Any, **settings: Any) -> Any:
    return op(*args, **settings)


def weights(shape: tuple[int, int], dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    torch.manual_seed(0)
    weight = torch.randn(shape) * scale
    if shape[0] > 10:
        weight[3] = 0
        weight[5:9] *= 1e-5
    return weight.to(dtype)


def test_nf4_has_the_quantiles_of_a_normal_distribution() -> None:
    edge = 0.9677083
    above, below = (torch.special.ndtri(torch.linspace(edge, 0.5, n, dtype=torch.float64)[:-1]) for n in (9, 8))
    values = torch.cat([above, -below, torch.zeros(1, dtype=torch.float64)]).sort().values
    torch.testing.assert_close(torch.tensor(NF4, dtype=torch.float64), values / values.max(), rtol=0, atol=2e-7)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_that_were_decoded_have_the_same_bytes(kind: Any, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        for scale in (1.0, 1e-30):
            weight = weights(shape, dtype, scale)
            packing = WeightFormat(kind, weight.shape, dtype)
            packed = packing.encode(weight)
            assert packed.dtype is torch.int32
            assert packed.shape == (packing.words,)
            decoded = packing.decode(packed)
            assert decoded.dtype is dtype
            assert decoded.shape == weight.shape
            for values in (decoded, decoded.float(), decoded.bfloat16()):
                assert torch.equal(packing.encode(values), packed)
            assert torch.equal(DEQUANTIZE(packed, list(shape), dtype, kind), decoded)


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_word_is_the_largest_absolute_value_of_the_decoded_weight(kind: Any) -> None:
    for shape in [*SHAPES, (40, 4096)]:  # the last one has several scales
        for scale in (1.0, 1e-38, 1e30):
            for largest in ((0, 0), (-1, -1)):
                weight = weights(shape, torch.float32, scale)
                weight[largest] *= -50
                packing = WeightFormat(kind, weight.shape, torch.float32)
                packed = packing.encode(weight)
                assert torch.equal(largest_value(run, packed, packing.words), packing.decode(packed).abs().max())
    weight = torch.ones(5, 70)
    weight[2, 3] = float("nan")
    packing = WeightFormat(kind, weight.shape, torch.float32)
    assert largest_value(run, packing.encode(weight), packing.words).isnan()


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_multiplied_as_float32_before_the_cast_to_fp8_and_transposed(kind: Any) -> None:
    for shape in SHAPES:
        packing = WeightFormat(kind, torch.Size(shape), torch.float32)
        packed = packing.encode(weights(shape, torch.float32))
        factor = 448 / largest_value(run, packed, packing.words)
        expected = (packing.decode(packed) * factor).to(torch.float8_e4m3fn)
        for transposed in (False, True):
            found = DEQUANTIZE(packed, list(shape), torch.float8_e4m3fn, kind, factor, transposed)
            assert found.is_contiguous()
            assert torch.equal(found.float(), expected.t().float() if transposed else expected.float())


def test_errors_of_nf4_stay_within_half_a_gap_and_half_a_level_of_the_maximum() -> None:
    weight = weights((300, 200), torch.float32)
    packing = WeightFormat("nf4", weight.shape, weight.dtype)
    error = (packing.decode(packing.encode(weight)) - weight).abs().view(-1)
    gap = max(b - a for a, b in zip(NF4, NF4[1:], strict=False)) / 2
    for begin in range(0, weight.numel(), BLOCK):
        block = weight.view(-1)[begin : begin + BLOCK].abs().max()
        group = begin // (BLOCK * SUPERBLOCK) * BLOCK * SUPERBLOCK
        scale = weight.view(-1)[group : group + BLOCK * SUPERBLOCK].abs().max()
        assert error[begin : begin + BLOCK].max() <= block * gap + scale * (0.5 / LEVELS + 2**-8) + 1e-7


def test_blocks_next_to_a_much_larger_one_keep_their_precision() -> None:
    weight = weights((300, 256), torch.float32)[16:].contiguous()
    packing = WeightFormat("nf4", weight.shape, weight.dtype)

    def error(weight: Tensor) -> float:
        blocks = weight.view(-1, BLOCK)
        difference = (packing.decode(packing.encode(weight)).view(-1, BLOCK) - blocks)[1:]
        return float(difference.norm() / blocks[1:].norm())

    alone = error(weight)
    weight[0, 0] = 400.0
    assert error(weight) < 1.1 * alone


def test_errors_of_int8_stay_within_half_a_level_of_each_row() -> None:
    weight = weights((33, 65), torch.bfloat16)
    packing = WeightFormat("int8", weight.shape, torch.float32)
    error = (packing.decode(packing.encode(weight)) - weight.float()).abs().amax(1)
    assert (error <= weight.float().abs().amax(1) * 0.5 / LEVELS * 1.0001).all()


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_stay_zeros_and_numbers_that_are_none_show(kind: Any) -> None:
    packing = WeightFormat(kind, torch.Size([5, 70]), torch.float32)
    assert not packing.decode(packing.encode(torch.zeros(5, 70))).any()
    weight = torch.ones(5, 70)
    weight[2, 3] = float("nan")
    assert packing.decode(packing.encode(weight))[2].isnan().all()


def test_large_weights_are_encoded_in_parts_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = weights((300, 200), torch.float32)
    packings = [WeightFormat(kind, weight.shape, weight.dtype) for kind in KINDS]
    at_once = [packing.encode(weight) for packing in packings]
    monkeypatch.setattr(weight_format, "_ENCODED_AT_ONCE", BLOCK * SUPERBLOCK)
    assert all(torch.equal(p.encode(weight), packed) for p, packed in zip(packings, at_once, strict=True))


def test_a_weight_takes_a_little_more_than_its_codes() -> None:
    side = 1 << 14
    assert 0.5 < packed_words(side, side, "nf4") * 4 / side**2 < 0.517
    assert 1.0 < packed_words(side, side, "int8") * 4 / side**2 < 1.001
