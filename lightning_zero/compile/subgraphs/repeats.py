"""Find runs of equal, adjacent parts in a sequence, such as the layers of a model."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class RepeatedRun:
    """Items ``start`` to ``stop`` (exclusive), each equal to the item ``period`` before it.

    The last repetition may be incomplete.
    """

    start: int
    stop: int
    period: int

    @property
    def repetitions(self) -> int:
        """Return the number of complete repetitions."""
        return (self.stop - self.start) // self.period


def find_repeats(items: Sequence[Hashable], shortest: int) -> list[RepeatedRun]:
    """Return disjoint runs in order: greedily the one with the most repeated items.

    Args:
        shortest: smallest period; a shorter part is not worth a call.
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
    """Return the run with the most repeated items; the shortest period wins ties."""
    best, spared = None, 0
    for period in range(shortest, len(items) // 2 + 1):
        if len(items) - period <= spared:
            break
        equal = np.flatnonzero(np.diff(np.concatenate(([0], items[:-period] == items[period:], [0]))))
        starts, stops = equal[::2], equal[1::2]  # ranges of items that equal the item one period later
        if not len(starts):
            continue
        longest = int(np.argmax(stops - starts))
        length = int(stops[longest] - starts[longest])
        # A range shorter than a period does not contain a complete repetition.
        if length >= period and length > spared:
            best, spared = RepeatedRun(int(starts[longest]), int(stops[longest]) + period, period), length
    return best
