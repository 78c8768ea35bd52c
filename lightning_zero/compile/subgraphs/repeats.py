"""Finds what repeats in a sequence: runs of equal parts, one right behind the other, as the layers of a model are."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["RepeatedRun", "find_repeats"]


@dataclass(frozen=True)
class RepeatedRun:
    """Items ``start`` to ``stop`` (exclusive) repeat after ``period``: each equals the one ``period`` before it.

    The last repetition may be incomplete.
    """

    start: int
    stop: int
    period: int

    @property
    def repetitions(self) -> int:
        """Complete ones."""
        return (self.stop - self.start) // self.period


def find_repeats(items: Sequence[Hashable], shortest: int) -> list[RepeatedRun]:
    """Runs that do not overlap, in order: first the one that spares most, then what is left and right of it.

    Args:
        items: compared by equality.
        shortest: periods of fewer items are not looked at: parts must be worth a call.
    """
    numbers: dict[Hashable, int] = {}
    encoded = np.array([numbers.setdefault(item, len(numbers)) for item in items], dtype=np.int64)
    found: list[RepeatedRun] = []
    pending = [(0, len(encoded))]
    while pending:
        begin, end = pending.pop()
        run = _longest(encoded[begin:end], shortest)
        if run is None:
            continue
        run = RepeatedRun(begin + run.start, begin + run.stop, run.period)
        found.append(run)
        pending += [(begin, run.start), (run.stop, end)]
    return sorted(found, key=lambda run: run.start)


def _longest(items: np.ndarray, shortest: int) -> RepeatedRun | None:
    """The run with most items that repeat others; of several, the one with the shortest period."""
    best, spared = None, 0
    for period in range(shortest, len(items) // 2 + 1):
        if len(items) - period <= spared:
            break
        equal = np.flatnonzero(np.diff(np.concatenate(([0], items[:-period] == items[period:], [0]))))
        starts, stops = equal[::2], equal[1::2]  # stretches of items that equal those one period later
        if not len(starts):
            continue
        longest = int(np.argmax(stops - starts))
        length = int(stops[longest] - starts[longest])
        # A shorter stretch than a period repeats nothing whole.
        if length >= period and length > spared:
            best, spared = RepeatedRun(int(starts[longest]), int(stops[longest]) + period, period), length
    return best
