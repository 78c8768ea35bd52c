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

    Two groups of layers, such as five of a kind and one of another, repeat once. A run is split into runs of its layers
    if more items repeat in these.

    Args:
        shortest: smallest period; a shorter part is not worth a call.
    """
    numbers: dict[Hashable, int] = {}
    encoded = np.array([numbers.setdefault(item, len(numbers)) for item in items], dtype=np.int64)
    return sorted(_find(encoded, shortest, len(encoded) // 2), key=lambda run: run.start)


def _find(items: np.ndarray, shortest: int, longest: int) -> list[RepeatedRun]:
    found: list[RepeatedRun] = []
    pending = [(0, len(items))]
    while pending:
        begin, end = pending.pop()
        run = _longest(items[begin:end], shortest, longest)
        if run is None:
            continue
        run = _moved(run, begin)
        found += _split(items, run, shortest) or [run]
        pending += [(begin, run.start), (run.stop, end)]
    return found


def _split(items: np.ndarray, run: RepeatedRun, shortest: int) -> list[RepeatedRun]:
    """Return the runs in a run, or none if fewer items repeat in them."""
    probe = _longest(items[run.start : run.start + 2 * run.period], shortest, run.period // 2)
    if probe is None or 2 * (probe.stop - probe.start) < run.period:  # most layers: spares a search of the whole run
        return []
    inner = [_moved(one, run.start) for one in _find(items[run.start : run.stop], shortest, run.period // 2)]
    # Repetitions begin anywhere, so equal ones are told by their items.
    kinds = {tuple(sorted(items[one.start : one.start + one.period])): one.period for one in inner}
    repeated = sum(one.stop - one.start for one in inner) - sum(kinds.values())
    return inner if repeated > run.stop - run.start - run.period else []


def _moved(run: RepeatedRun, offset: int) -> RepeatedRun:
    return RepeatedRun(run.start + offset, run.stop + offset, run.period)


def _longest(items: np.ndarray, shortest: int, longest: int) -> RepeatedRun | None:
    """Return the run with the most repeated items; the shortest period wins ties.

    Args:
        longest: largest period.
    """
    best, spared = None, 0
    for period in range(shortest, min(longest, len(items) // 2) + 1):
        if len(items) - period <= spared:
            break
        equal = np.flatnonzero(np.diff(np.concatenate(([0], items[:-period] == items[period:], [0]))))
        starts, stops = equal[::2], equal[1::2]  # ranges of items that equal the item one period later
        if not len(starts):
            continue
        widest = int(np.argmax(stops - starts))
        length = int(stops[widest] - starts[widest])
        # A range shorter than a period does not contain a complete repetition.
        if length >= period and length > spared:
            best, spared = RepeatedRun(int(starts[widest]), int(stops[widest]) + period, period), length
    return best
