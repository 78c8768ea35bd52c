"""Pareto-optimal picks of a knapsack."""

import random
from itertools import product

import pytest

from lightning_zero.memory_planner.choices import Item, Variant, frontier, pick


def some_items(seed: int) -> list[Item]:
    rng = random.Random(seed)
    return [
        Item(
            f"item {number}",
            tuple(Variant(at, rng.randrange(0, 30), rng.randrange(0, 12) / 4) for at in range(rng.randrange(1, 6))),
        )
        for number in range(rng.randrange(1, 5))
    ]


def everything(items: list[Item]) -> list[tuple[int, float]]:
    return [(sum(v.nbytes for v in way), sum(v.seconds for v in way)) for way in product(*(i.variants for i in items))]


@pytest.mark.parametrize("seed", range(60))
def test_nothing_is_faster_within_the_same_bytes(seed: int) -> None:
    items = some_items(seed)
    ways = everything(items)
    for limit in range(-1, 130, 3):
        found = pick(items, limit)
        within = [(seconds, nbytes) for nbytes, seconds in ways if nbytes <= limit]
        if within:
            assert (found.seconds, found.nbytes) == min(within)
        else:
            assert found.nbytes == min(nbytes for nbytes, _ in ways)
        assert found.nbytes == sum(variant.nbytes for variant in found.chosen)
        assert found.seconds == sum(variant.seconds for variant in found.chosen)
        assert all(one in item.variants for one, item in zip(found.chosen, items, strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_less_memory_is_never_more_used_and_never_faster(seed: int) -> None:
    items = some_items(seed)
    found = [pick(items, limit) for limit in range(130)]
    assert all(a.nbytes <= b.nbytes for a, b in zip(found, found[1:], strict=False))
    fitting = [one for limit, one in enumerate(found) if one.nbytes <= limit]
    assert all(a.seconds >= b.seconds for a, b in zip(fitting, fitting[1:], strict=False))


def test_the_frontier_stays_small_where_ways_are_many() -> None:
    items = [Item("", tuple(Variant(n, n * 10, (40 - n) / 10) for n in range(40))) for _ in range(5)]
    assert len(frontier(items)) <= 5 * 39 + 1  # of 10^8 ways
