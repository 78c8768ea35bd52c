"""Test stochastic rounding: unbiased, exact for bfloat16 values, and independent of the sharding."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_zero.optim.bf16_state import ElementPositions, noise_keys, rounding_noise, stochastic_round
from tests.helpers.one_rank import OneRank

CPU = torch.device("cpu")
HALVES = torch.arange(1 << 16)
WORDS = (HALVES * 40503 % (1 << 16)) << 16 | HALVES  # each half of a word takes every value once
SHAPES = [(8, 100), (70,), (33, 9), (3,)]


@pytest.mark.parametrize("number", [0, 1])
def test_a_value_is_kept_on_average_over_all_noise_exactly(number: int) -> None:
    torch.manual_seed(0)
    values = torch.cat([torch.randn(40), 1e-39 * torch.randn(8), 1e38 * torch.randn(8), torch.tensor([1.0, -1.0])])
    for value in values.tolist():
        exact = torch.full((len(WORDS),), value)
        found = stochastic_round(exact, WORDS, number)
        assert found.dtype is torch.bfloat16
        assert found.double().mean().item() == exact[0].double().item()
        below = exact[0].view(torch.int32).bitwise_and(-65536).view(torch.float32)
        assert (found.double().abs() >= below.double().abs()).all()
        assert len(found.unique()) <= 2


@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_what_bfloat16_holds_stays_as_it_is(number: int) -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for word in (0, 0xFFFFFFFF, 0x12345678):
        found = stochastic_round(every.float(), torch.tensor(word), number)
        torch.testing.assert_close(found, every, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(found.signbit()[~found.isnan()], every.signbit()[~every.isnan()])


def noise(bench: OneRank, step: float = 7.0) -> Tensor:
    records: Any = bench.live
    at = ElementPositions.from_members(records, CPU)
    return rounding_noise(at.owners, at.shifts, at.begin, noise_keys(at.salts, torch.tensor(step)))


def whole(world_size: int) -> list[Tensor]:
    """Return each full parameter from the parts of ``world`` ranks."""
    ranks = [OneRank(SHAPES, rank=rank, world_size=world_size) for rank in range(world_size)]
    numels = [record.layout.shard_numel for record in ranks[0].live]
    parts = [noise(rank).split(numels) for rank in ranks]
    return [
        torch.cat(shards)[: math.prod(shape)] for shape, shards in zip(SHAPES, zip(*parts, strict=True), strict=True)
    ]


def test_noise_is_the_same_on_any_number_of_ranks() -> None:
    for world_size in (2, 3):
        assert all(map(torch.equal, whole(world_size), whole(1)))


def test_a_part_has_the_noise_that_it_has_in_the_whole() -> None:
    bench: Any = OneRank(SHAPES)
    at = ElementPositions.from_members(bench.live, CPU).part(64, 864)
    found = rounding_noise(at.owners, at.shifts, at.begin, noise_keys(at.salts, torch.tensor(7.0)))
    assert torch.equal(found, noise(bench)[64:864])


def test_noise_looks_random_over_elements_steps_parameters_and_halves() -> None:
    bench = OneRank([(512, 256), (512, 256)])
    numel = 512 * 256
    first, second = (noise(bench, step) for step in (7.0, 8.0))
    low, high = first & 0xFFFF, first >> 16
    assert first.min() >= 0
    assert high.max() < 1 << 16
    streams = [
        low[:numel],
        high[:numel],
        low[numel:],
        second[:numel] & 0xFFFF,
        low[1 : numel + 1],
        low[32 : numel + 32],
    ]
    for number, stream in enumerate(streams):
        counts = torch.bincount(stream >> 8, minlength=256).double()
        expected = numel / 256
        chi = ((counts - expected) ** 2 / expected).sum().item()  # 255 on average, with a deviation of sqrt(510)
        assert abs(chi - 255) < 5 * math.sqrt(510), f"stream {number} is not uniform"
    pairs = torch.corrcoef(torch.stack(streams).double()) - torch.eye(len(streams), dtype=torch.float64)
    assert pairs.abs().max() < 5 / math.sqrt(numel), f"streams that follow each other: {pairs}"


LARGE = (32, 32)


def equally_large(share: float) -> Tensor:
    return torch.randn(LARGE).flatten()


def falling(share: float) -> Tensor:
    """Gradients that fall to a tenth; their sizes differ by up to a thousand between elements."""
    return torch.randn(LARGE).flatten() * torch.logspace(-3, 0, math.prod(LARGE)) * 10**-share


@pytest.mark.parametrize(("gradient", "most", "to_the_nearest"), [(equally_large, 0.025, 0.08), (falling, 0.04, 0.3)])
def test_adams_steps_are_off_by_a_few_percent_where_rounding_to_the_nearest_is_off_by_far_more(
    gradient: Callable[[float], Tensor], most: float, to_the_nearest: float
) -> None:
    """The numbers in examples/docs/reference/options.md are those of this test."""
    torch.manual_seed(0)
    steps, betas = 2000, (0.9, 0.999)
    records: Any = OneRank([LARGE]).live
    at = ElementPositions.from_members(records, CPU)
    exact, narrow, nearest = (torch.zeros(2, math.prod(LARGE)) for _ in range(3))
    for step in range(steps):
        new = gradient(step / steps)
        for kept in (exact, narrow, nearest):
            for average, beta, value in zip(kept, betas, (new, new * new), strict=True):
                average.lerp_(value, 1 - beta)
        words = rounding_noise(at.owners, at.shifts, at.begin, noise_keys(at.salts, torch.tensor(step)))
        for number, average in enumerate(narrow):
            average.copy_(stochastic_round(average, words, number))
        nearest.copy_(nearest.bfloat16())

    def off(kept: Tensor) -> float:
        """Return the root mean square of the steps' error relative to that of the steps."""
        moved, expected = (first / second.sqrt() for first, second in (kept, exact))
        return ((moved - expected).square().mean() / expected.square().mean()).sqrt().item()

    assert off(narrow) < most < to_the_nearest < off(nearest)
    assert (narrow[1] / exact[1]).mean().item() == pytest.approx(1, abs=2e-3)
