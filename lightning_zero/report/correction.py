"""Estimates of a step's time and memory, corrected by what was measured.

Time: every node's seconds are multiplied by one factor, so that the step's graphs, one after the other, with the
waiting for transfers that is left then, take as long as forward and backward took. Memory: every graph's timeline is
shifted by the same number of bytes, so that the highest one takes as much beyond what was there before as the step did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_zero.report.memory import MemoryPoint, MemoryTimeline
from lightning_zero.report.timeline import Streams

__all__ = ["Measured", "compute_factor", "memory_shift", "shifted"]

HALVINGS = 40


@dataclass(frozen=True)
class Measured:
    """What some steps really took.

    Attributes:
        pass_s: seconds of one forward and backward, the median; None where a batch had no backward, or several.
        batch_s: seconds of a whole batch, the optimizer's step included where there was one; the median, None for none.
        gathered: bytes of whole weights that were gathered in forward and backward, the median.
        peak: bytes of tensors at the peak of forward and backward; None where the device does not tell.
        resident: bytes of tensors before that forward; likewise.
    """

    pass_s: float | None
    batch_s: float | None
    gathered: int
    peak: int | None = None
    resident: int | None = None

    @property
    def added(self) -> int | None:
        """Bytes that forward and backward took beyond what was there."""
        return None if self.peak is None or self.resident is None else max(self.peak - self.resident, 0)


def compute_factor(graphs: Sequence[Streams], seconds: float) -> float | None:
    """By which to multiply the seconds of all nodes, so that the graphs together take so many seconds; None where no
    factor does, because nothing is computed or because transfers alone take longer."""
    computed = sum(node.seconds for graph in graphs for node in graph.compute)
    if computed <= 0 or _seconds(graphs, 0.0) >= seconds:
        return None
    low, high = 0.0, seconds / computed  # with the latter, compute alone takes as long
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if _seconds(graphs, middle) < seconds else (low, middle)
    return high


def _seconds(graphs: Sequence[Streams], factor: float) -> float:
    return sum(graph.run(factor).seconds for graph in graphs)


def memory_shift(graphs: Sequence[MemoryTimeline], added: int) -> int:
    """The bytes by which to shift the graphs' timelines, where a step took ``added`` bytes beyond what was there."""
    return added - estimated_bytes(graphs)


def estimated_bytes(graphs: Sequence[MemoryTimeline]) -> int:
    """What the highest of the graphs takes beyond what is there before the step."""
    return max((graph.peak - graph.held for graph in graphs), default=0)


def shifted(timeline: MemoryTimeline, by: int) -> MemoryTimeline:
    """The timeline higher by so many bytes, or lower, but never below what is there before the step."""

    def moved(nbytes: int) -> int:
        return max(nbytes + by, min(nbytes, timeline.held))

    points = tuple(MemoryPoint(point.name, moved(point.during), moved(point.after)) for point in timeline.points)
    return replace(timeline, points=points, peak=moved(timeline.peak))
