"""Simulate the waits of backward step by step: the oracle of ``compile/passes/saved_weights.py``."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet


def waits(sizes: Sequence[int], kept: AbstractSet[int]) -> list[float]:
    """For each weight, in bytes that travel; 0 for those that are kept."""
    arrived = now = 0.0
    found = [0.0] * len(sizes)
    for place, size in enumerate(sizes):
        if place not in kept:
            arrived += size
            found[place] = max(arrived - now, 0.0)
            now += found[place]
        now += size
    return found


def within(sizes: Sequence[int], kept: AbstractSet[int], budget: float) -> list[int]:
    """Places of those that are to be kept besides."""
    chosen: list[int] = []
    fits = [place for place, size in enumerate(sizes) if place not in kept and size <= budget]
    if sum(sizes[place] for place in fits) <= budget:
        return fits
    while fits:
        waited = waits(sizes, kept | set(chosen))
        best = max(fits, key=lambda place: waited[place] / sizes[place])  # of equal ones, the first
        chosen.append(best)
        budget -= sizes[best]
        fits = [place for place in fits if place != best and sizes[place] <= budget]
    return chosen
