"""Where a graph is cut: at the same places in each repetition, and where the code generator would not have fused what
comes before with what comes behind."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_zero.compile.subgraphs.node_order import NodeOrder
from lightning_zero.compile.subgraphs.repeats import RepeatedRun

__all__ = ["choose_cut_points"]

# What ops hand each other in registers goes through memory at a seam: at most so much of what kernels write anyway.
LOST_SHARE = 0.001


@dataclass(frozen=True)
class _Candidates:
    """Of seams: where they may be, in order, and by place what has been done before, and what each would lose."""

    possible: Sequence[int]
    done: Sequence[int]
    lost: Sequence[int]
    allowed: float

    def cheap(self, begin: int, end: int) -> list[int]:
        """From ``begin`` to before ``end``: those that lose next to nothing; or else the one that loses least."""
        here = [place for place in self.possible if begin <= place < end]
        cheap = [place for place in here if self.lost[place] <= self.allowed]
        return cheap or sorted(here, key=lambda place: self.lost[place])[:1]


def choose_cut_points(order: NodeOrder, runs: Sequence[RepeatedRun], between: Sequence[int], parts: int) -> list[int]:
    """Places in ``order.work`` before which the graph is cut, in order; 0 and the end are not among them.

    Args:
        order: of the graph.
        runs: its repetitions.
        between: places before which something runs between pieces.
        parts: at most so many pieces for each repetition.
    """
    done = [0]
    for effort in order.effort():
        done.append(done[-1] + effort)
    places = _Candidates(order.cut_points(), done, order.lost(), LOST_SHARE * order.written())
    cut_points: set[int] = set()
    at = 1
    for run in runs:
        chosen = _in_run(run, places, parts)
        cut_points |= {*chosen, *_snapped(between, places, at, min(chosen, default=run.start))}
        at = max(chosen, default=run.start) + 1
    cut_points |= _snapped(between, places, at, len(order.work))
    return sorted(cut_points - {0, len(order.work)})


def _in_run(run: RepeatedRun, places: _Candidates, parts: int) -> list[int]:
    """Cuts every repetition alike, into about equal parts."""
    middle = run.start + (run.repetitions // 2) * run.period  # one repetition stands for all
    begin = min(middle, run.stop - run.period)
    cheap = places.cheap(begin, begin + run.period)
    if not cheap:
        return []
    first = cheap[0]
    total = places.done[begin + run.period] - places.done[begin]
    done = {place: places.done[place] - places.done[first] for place in cheap}
    goals = (total * part / parts for part in range(1, parts))
    chosen = {first, *(min(cheap, key=lambda place: abs(done[place] - goal)) for goal in goals)}
    offsets = sorted(place - begin for place in chosen)
    repeated = (run.start + number * run.period + offset for number in range(run.repetitions + 1) for offset in offsets)
    return [place for place in repeated if place <= run.stop]


def _snapped(between: Sequence[int], places: _Candidates, begin: int, end: int) -> set[int]:
    """Where nothing repeats: cuts at the places nearest before what runs between pieces."""
    cheap = places.cheap(begin, end)
    behind = (bisect_right(cheap, place) for place in between if begin <= place < end)
    return {cheap[number - 1] for number in behind if number}
