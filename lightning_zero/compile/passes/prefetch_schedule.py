"""Where in a graph groups of gathers are started, and where they are waited for.

A group is waited for at its first use. Without estimates it is started where the group before it is first used: one
group ahead. With estimates it is started as late as its transfer still hides behind the nodes before its use, counting
that transfers queue one behind the other: whole weights that arrive early only take up memory. Where a transfer cannot
be hidden, it is started as early as there is room for, and never later than one group ahead.

Only positions depend on estimates, and never the order of launches: batches of other shapes, on other ranks, have other
estimates.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate

from torch.fx import Graph, Node

from lightning_zero.compile.fx_utils import first_call, readers
from lightning_zero.profiling.estimate import CostModel

__all__ = ["PrefetchBudget", "node_seconds", "prefetch_schedule"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PrefetchBudget:
    """What decides how early a group is started.

    Attributes:
        costs: seconds for transfers and nodes.
        sizes: bytes of each group.
        window_bytes: a group is started earlier than one group ahead only where, with it, at most so many bytes of
            groups are in flight or in use.
    """

    costs: CostModel
    sizes: Sequence[int]
    window_bytes: float


def prefetch_schedule(
    graph: Graph,
    groups: Sequence[list[Node]],
    at_once: Sequence[bool],
    ahead: int,
    budget: PrefetchBudget | None = None,
) -> tuple[list[Node], list[Node]]:
    """The nodes that each group is started before, and waited for before. Groups are started in their order.

    Args:
        at_once: whether a group is small, and may be started at the beginning.
        ahead: others are started where the group that comes ``ahead`` before is first used.
        budget: whether earlier is better, or later early enough; None to start groups where the above says.
    """
    anchors = list(graph.nodes)
    position = {node: number for number, node in enumerate(anchors)}
    begin = position[first_call(graph)]
    waits = [min(position[node] for node in group) for group in groups]
    starts = _ahead(waits, at_once, ahead, begin)
    if budget is not None:
        last = [max(_last_use(node, position) for node in group) for group in groups]
        large = [0 if now else size for now, size in zip(at_once, budget.sizes, strict=True)]
        room = _room(last, large, budget.window_bytes, begin)
        # Both grow from group to group, so their minimum does.
        earliest = list(map(min, starts, room))
        starts = _just_in_time(node_seconds(graph, budget.costs), waits, earliest, budget)
    return [anchors[start] for start in starts], [anchors[wait] for wait in waits]


def node_seconds(graph: Graph, costs: CostModel) -> list[float]:
    """Of each node of a graph; all zero where the estimate fails."""
    try:
        return costs.node_seconds(graph)
    except Exception as error:  # an op that the estimate does not understand must not end a compilation
        log.warning(
            "The cost of a graph's nodes could not be estimated (%s: %s). What travels starts as early as there is "
            "room for. Training goes on; please report the op.",
            type(error).__name__,
            error,
        )
        return [0.0] * len(graph.nodes)


def _ahead(waits: Sequence[int], at_once: Sequence[bool], ahead: int, begin: int) -> list[int]:
    large = [number for number, now in enumerate(at_once) if not now]
    starts = [begin] * len(waits)
    for rank, number in enumerate(large):
        if rank >= ahead:
            starts[number] = min(waits[large[rank - ahead]], waits[number])
    return _in_order(starts)


def _in_order(starts: list[int]) -> list[int]:
    """Each at most as late as the next."""
    return list(accumulate(reversed(starts), min))[::-1]


def _last_use(node: Node, position: dict[Node, int]) -> int:
    """Of a weight within the graph. One that the graph returns is another budget's."""
    return max((position[user] for user in readers(node) if user.op != "output"), default=position[node])


def _room(last: Sequence[int], sizes: Sequence[int], window_bytes: float, begin: int) -> list[int]:
    """For each group, the first position, not before that of an earlier one, at which it fits next to those before it
    that are still needed."""
    found, at, alive = [], begin, 0
    ends: list[tuple[int, int]] = []  # of those that are alive
    for end, size in zip(last, sizes, strict=True):
        while ends and size and alive + size > window_bytes:
            over, freed = heappop(ends)
            at, alive = max(at, over + 1), alive - freed
        found.append(at)
        heappush(ends, (end, size))
        alive += size
    return found


def _just_in_time(
    seconds: Sequence[float], waits: Sequence[int], earliest: Sequence[int], budget: PrefetchBudget
) -> list[int]:
    """From the last group to the first: where each is started for its transfer to end before its use, and before the
    next one's transfer has to begin."""
    clock = [0.0, *accumulate(seconds)]  # when each node begins, if nothing waits
    starts, due = list(earliest), float("inf")
    for number in reversed(range(len(waits))):
        launch = min(due, clock[waits[number]]) - budget.costs.gather_seconds(budget.sizes[number])
        if launch >= clock[earliest[number]]:
            starts[number] = max(earliest[number], min(bisect_right(clock, launch) - 1, waits[number]))
        # No transfer begins before its group may be started: one before it need not end any earlier.
        due = max(launch, clock[earliest[number]])
    return _in_order(starts)
