"""A knapsack of several items, of each of which exactly one variant is taken: the fewest seconds within some bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Item", "Pick", "Variant", "frontier", "pick"]


@dataclass(frozen=True)
class Variant:
    """One way to have something.

    Attributes:
        value: what to set for it.
        nbytes: of the device, at the peak.
        seconds: of a step of the optimizer.
    """

    value: Any
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Item:
    """Something that is had in exactly one of some ways.

    Attributes:
        name: what it is, for people.
        variants: at least one.
        by_hand: the user has chosen, so there is only one.
    """

    name: str
    variants: tuple[Variant, ...]
    by_hand: bool = False


@dataclass(frozen=True)
class Pick:
    """One variant of each item, and what they come to together."""

    chosen: tuple[Variant, ...]
    nbytes: int
    seconds: float


def frontier(items: Sequence[Item]) -> list[Pick]:
    """Every pick to which no other is better in one respect and as good in the other, by growing bytes. Items are added
    one by one, and what is not on the frontier of some of them is not on that of all."""
    found = [Pick((), 0, 0.0)]
    for item in items:
        found = _best(
            Pick((*before.chosen, one), before.nbytes + one.nbytes, before.seconds + one.seconds)
            for before in found
            for one in item.variants
        )
    return found


def pick(items: Sequence[Item], nbytes: float) -> Pick:
    """The fewest seconds within so many bytes; of equally fast picks the one with the fewest bytes. Where nothing fits,
    that with the fewest bytes of all."""
    along = frontier(items)
    return next((one for one in reversed(along) if one.nbytes <= nbytes), along[0])


def _best(picks: Iterable[Pick]) -> list[Pick]:
    found: list[Pick] = []
    for one in sorted(picks, key=lambda one: (one.nbytes, one.seconds)):
        if not found or one.seconds < found[-1].seconds:
            found.append(one)
    return found
