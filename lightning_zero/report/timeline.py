"""Who waits for whom when a graph runs: a simulation of its streams.

Compute runs node by node. A gather is launched when compute reaches a node, runs on the gather stream behind the
gathers before it, and compute waits for it at another node. A reduce is launched likewise on the reduce stream, and
nobody waits for it before the graph ends. Streams do not slow each other down.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

__all__ = ["Compute", "Gather", "Interval", "Reduce", "Streams", "Timeline", "simulate"]


@dataclass(frozen=True)
class Compute:
    """One node on the compute stream."""

    label: str
    seconds: float


@dataclass(frozen=True)
class Gather:
    """``started`` and ``waited`` are indices of compute nodes: it is launched, and waited for, before they run."""

    label: str
    started: int
    waited: int
    seconds: float


@dataclass(frozen=True)
class Reduce:
    """``at`` is the index of a compute node: it is launched after that node ran."""

    label: str
    at: int
    seconds: float


@dataclass(frozen=True)
class Interval:
    """Something that ran, in seconds since the graph began."""

    start: float
    end: float
    label: str


@dataclass(frozen=True)
class Timeline:
    """What ran when.

    Attributes:
        compute: nodes that take time, in order.
        gathers: one interval for each gather, in the order given.
        reduces: one interval for each reduce, in the order given.
        exposed: for each gather, the seconds that compute stood idle for it.
        tail: seconds that reduces run on after the last node.
    """

    compute: tuple[Interval, ...]
    gathers: tuple[Interval, ...]
    reduces: tuple[Interval, ...]
    exposed: tuple[float, ...]
    tail: float

    @property
    def seconds(self) -> float:
        """From the beginning to the end of the last stream."""
        return max((interval.end for interval in (*self.compute, *self.gathers, *self.reduces)), default=0.0)


@dataclass(frozen=True)
class Streams:
    """What a graph's streams are given to do; see :func:`simulate`."""

    compute: tuple[Compute, ...]
    gathers: tuple[Gather, ...]
    reduces: tuple[Reduce, ...]

    def run(self, factor: float = 1.0) -> Timeline:
        """With each node's seconds times ``factor``; transfers take as long as they take."""
        compute = [replace(node, seconds=node.seconds * factor) for node in self.compute]
        return simulate(compute, self.gathers, self.reduces)


def simulate(compute: Sequence[Compute], gathers: Sequence[Gather], reduces: Sequence[Reduce]) -> Timeline:
    """Runs the streams.

    Args:
        gathers: any order; those that start at the same node run in the order given.
        reduces: likewise.

    Raises:
        ValueError: an index lies outside the graph, or a gather is waited for before it starts.
    """
    last = len(compute) - 1
    for gather in gathers:
        if not 0 <= gather.started <= gather.waited <= last:
            raise ValueError(f"{gather} does not fit a graph of {len(compute)} nodes.")
    for reduce in reduces:
        if not 0 <= reduce.at <= last:
            raise ValueError(f"{reduce} does not fit a graph of {len(compute)} nodes.")

    now = gather_free = reduce_free = 0.0
    ran: list[Interval] = []
    gathered: dict[int, Interval] = {}
    reduced: dict[int, Interval] = {}
    exposed = [0.0] * len(gathers)
    starting = _by_index(gather.started for gather in gathers)
    waiting = _by_index(gather.waited for gather in gathers)
    handing = _by_index(reduce.at for reduce in reduces)
    for index, node in enumerate(compute):
        for number in starting.get(index, ()):
            begin = max(now, gather_free)
            gather_free = begin + gathers[number].seconds
            gathered[number] = Interval(begin, gather_free, gathers[number].label)
        # First come, first served: what a later gather is waited for beyond an earlier one is its own.
        for number in sorted(waiting.get(index, ()), key=lambda number: gathered[number].end):
            reached, now = now, max(now, gathered[number].end)
            exposed[number] = now - reached
        if node.seconds > 0:
            ran.append(Interval(now, now + node.seconds, node.label))
            now += node.seconds
        for number in handing.get(index, ()):
            begin = max(now, reduce_free)
            reduce_free = begin + reduces[number].seconds
            reduced[number] = Interval(begin, reduce_free, reduces[number].label)
    return Timeline(
        tuple(ran),
        tuple(gathered[number] for number in range(len(gathers))),
        tuple(reduced[number] for number in range(len(reduces))),
        tuple(exposed),
        max(reduce_free - now, 0.0),
    )


def _by_index(indices: Iterable[int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for number, index in enumerate(indices):
        found.setdefault(index, []).append(number)
    return found
