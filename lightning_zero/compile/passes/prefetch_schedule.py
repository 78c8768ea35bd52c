"""Choose where groups of gathers start and where they are waited for.

A group is waited for at its first use. Without estimates it starts at the first use of the previous group, one group
ahead. With estimates it starts as late as its transfer is still hidden by compute, given that transfers are queued:
weights that arrive early only use memory. A transfer that cannot be hidden starts as early as memory allows, and never
later than one group ahead.

Estimates change only positions and never the order of launches, because ranks with other batch shapes have other
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
from lightning_zero.profiling.cost_model import CostModel

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PrefetchBudget:
    """Bounds on how early a group starts.

    Attributes:
        costs: seconds of transfers and nodes.
        sizes: bytes of each group.
        window_bytes: bound on bytes of groups in flight or in use if a group starts more than one group ahead.
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
    """Return the nodes before which each group starts and is waited for; groups start in order.

    Args:
        at_once: True for small groups, which may start at the beginning.
        ahead: a large group starts at the first use of the group this many groups earlier.
        budget: estimates that move starts earlier or later; None to use only ``ahead``.
    """
    anchors = list(graph.nodes)
    position = {node: number for number, node in enumerate(anchors)}
    begin = position[first_call(graph)]
    waits = [min(position[node] for node in group) for group in groups]
    starts = _ahead(waits, at_once, ahead, begin)
    if budget is not None:
        last = [max(_last_use(node, position) for node in group) for group in groups]
        large = [0 if now else size for now, size in zip(at_once, budget.sizes, strict=True)]
        room = _earliest_fit(last, large, budget.window_bytes, begin)
        # Both are monotonic over groups, so their minimum is, too.
        earliest = list(map(min, starts, room))
        starts = _just_in_time(node_seconds(graph, budget.costs), waits, earliest, budget)
    return [anchors[start] for start in starts], [anchors[wait] for wait in waits]


def node_seconds(graph: Graph, costs: CostModel) -> list[float]:
    """Return seconds per node; all zero if the estimate fails."""
    try:
        return costs.node_seconds(graph)
    except Exception as error:  # an op without an estimate must not fail the compilation
        log.warning(
            "The cost of a graph's nodes could not be estimated (%s: %s). Transfers start as early as memory "
            "allows. Training continues; please report the op.",
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
    return list(accumulate(reversed(starts), min))[::-1]


def _last_use(node: Node, position: dict[Node, int]) -> int:
    """Return the last use of a weight within the graph; the saved-weights budget counts returned ones."""
    return max((position[user] for user in readers(node) if user.op != "output"), default=position[node])


def _earliest_fit(last: Sequence[int], sizes: Sequence[int], window_bytes: float, begin: int) -> list[int]:
    """Return the first position at which each group fits in memory with those before it that are in use.

    Positions increase with the groups.
    """
    found, at, alive = [], begin, 0
    ends: list[tuple[int, int]] = []  # of groups in use
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
    """Place starts from the last group to the first, so that transfers end before use and do not overlap."""
    clock = [0.0, *accumulate(seconds)]  # start of each node if nothing waits
    starts, due = list(earliest), float("inf")
    for number in reversed(range(len(waits))):
        launch = min(due, clock[waits[number]]) - budget.costs.gather_seconds(budget.sizes[number])
        if launch >= clock[earliest[number]]:
            starts[number] = max(earliest[number], min(bisect_right(clock, launch) - 1, waits[number]))
        # A transfer does not start before its group may start, so the previous one need not end earlier.
        due = max(launch, clock[earliest[number]])
    return _in_order(starts)
