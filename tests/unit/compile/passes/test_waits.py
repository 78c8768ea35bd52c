"""What backward waits for, and what is kept by that, is as an oracle has it that goes through all weights each time."""

import random
import time

import pytest

from lightning_zero.compile.passes.saved_weights import BackwardWaits, _Weight, _within
from tests.helpers import waits as oracle


def drawn(seed: int) -> tuple[random.Random, list[int], set[int]]:
    """Sizes, of which many are the same, as in layers; and what is kept already."""
    chance = random.Random(seed)
    alike = [chance.randint(1, 60) for _ in range(chance.randint(1, 5))]
    sizes = [chance.choice(alike) for _ in range(chance.randint(1, 40))]
    return chance, sizes, {place for place in range(len(sizes)) if chance.random() < 0.2}


@pytest.mark.parametrize("seed", range(40))
def test_waits_are_those_of_a_queue_whatever_is_kept_and_never_grow(seed: int) -> None:
    chance, sizes, kept = drawn(seed)
    found = BackwardWaits(sizes, [place in kept for place in range(len(sizes))])
    before = [float("inf")] * len(sizes)
    left = [place for place in range(len(sizes)) if place not in kept]
    while left:
        expected = oracle.waits(sizes, kept)
        assert [found.of(place) for place in left] == [expected[place] for place in left]
        assert all(expected[place] <= before[place] for place in left)
        before = expected
        place = left.pop(chance.randrange(len(left)))
        found.keep(place)
        kept.add(place)


@pytest.mark.parametrize("seed", range(80))
def test_the_same_weights_are_kept_in_the_same_order(seed: int) -> None:
    chance, sizes, kept = drawn(seed)
    weights = [_Weight([], size, 0, 0, place) for place, size in enumerate(sizes)]
    budget = chance.random() * sum(sizes)
    found = _within(weights, {weights[place] for place in kept}, budget)
    assert [weight.again for weight in found] == oracle.within(sizes, kept, budget)


def test_ten_thousand_weights_take_less_than_a_second() -> None:
    chance = random.Random(0)
    weights = [_Weight([], chance.choice([8, 16, 22, 88]), 0, 0, place) for place in range(10_000)]
    begun = time.process_time()
    found = _within(weights, set(), sum(weight.size for weight in weights) / 2)
    assert time.process_time() - begun < 1.0, "all of them were looked at for each"
    assert found
