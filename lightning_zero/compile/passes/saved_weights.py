"""Choose gathered weights that are kept from forward to backward instead of being gathered twice.

Small weights always: their transfers at the beginning of backward are not hidden. The last group of a step's forward if
backward needs it first. Others within a budget, by the time that backward would wait for them per byte.

The estimate depends only on weights, their order of use and sizes. Measured bandwidths and batch shapes are excluded,
because ranks with other shapes or cached graphs must gather the same weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf

import torch
from torch.fx import Graph, Node

from lightning_zero.compat.graphs import TANGENTS
from lightning_zero.compile.fx_utils import (
    InPlaceReads,
    cast_dtype,
    gathers,
    is_dequantize,
    is_view_or_cast,
    readers,
    shard_of,
)
from lightning_zero.compile.passes.gather_groups import max_group_bytes
from lightning_zero.profiling.graph_tensors import nbytes


@dataclass(frozen=True)
class SavedLimits:
    """Limits on weights that a graph keeps from forward to backward.

    Attributes:
        small_bytes: weights up to this size, in the saved dtype, are always kept.
        budget_bytes: bound for all others. A weight that does not fit is skipped.
        group_bytes: bound on the last group, kept if backward follows right after this forward; 0 if it does not.
        share: adds this share of the remaining re-gathered bytes to the budget.
        in_place: what this rank reads without a copy, so that there is nothing to keep of it; None for nothing.
    """

    small_bytes: int = 0
    budget_bytes: float = 0.0
    group_bytes: int = 0
    parts: int = 1
    share: float = 0.0
    in_place: InPlaceReads | None = None


NOTHING_SAVED = SavedLimits()


@dataclass(frozen=True, eq=False)
class _Weight:
    """A weight in one dtype; tied weights are one. Positions are of nodes in the joint graph.

    Attributes:
        size: bytes.
        first, last: first and last use in forward.
        again: first use in backward; None for no use.
    """

    nodes: list[Node]
    size: int
    first: int
    last: int
    again: int | None


def choose_saved(graph: Graph, limits: SavedLimits) -> list[Node]:
    """Return the nodes of a joint graph to save for backward: gathers, or casts of gathers."""
    weights = _weights(graph)
    if limits.in_place is not None:
        weights = [weight for weight in weights if not all(map(limits.in_place.covers_form, weight.nodes))]
    small = [weight for weight in weights if weight.size <= limits.small_bytes]
    large = [weight for weight in weights if weight.size > limits.small_bytes]
    again = sorted((weight for weight in large if weight.again is not None), key=lambda weight: weight.again or 0)
    saved = {weight for weight in small if weight.again is not None}
    saved.update(_last_group(large, again, limits.group_bytes, limits.parts))
    rest = sum(weight.size for weight in again if weight not in saved)
    saved.update(_within(again, saved, limits.budget_bytes + limits.share * rest))
    return [node for weight in weights if weight in saved for node in weight.nodes]


def _weights(graph: Graph) -> list[_Weight]:
    backward = backward_nodes(graph)
    position = {node: number for number, node in enumerate(graph.nodes)}
    forms: dict[tuple[object, torch.dtype], list[Node]] = {}
    for gather in reversed(gathers(graph)):
        for node in _forms(gather):
            forms.setdefault((shard_of(gather), node.meta["val"].dtype), []).append(node)
    found = []
    for nodes in forms.values():
        users = {user for node in nodes for user in readers(node) if not _only_view(user) and user.op != "output"}
        before, after = ([position[user] for user in some] for some in (users - backward, users & backward))
        own = [position[node] for node in nodes]
        found.append(
            _Weight(
                nodes,
                nbytes(nodes[0].meta["val"]),
                min(before, default=min(own)),
                max(before, default=max(own)),
                min(after, default=None),
            )
        )
    return found


def _last_group(
    weights: Sequence[_Weight], again: Sequence[_Weight], group_bytes: int, parts: int
) -> Iterator[_Weight]:
    """Yield the weights that backward needs first, if forward uses each of them after all others.

    Memory peaks around the end of forward. These weights may take no more than the group that would be in flight then.
    """
    left = list(weights)
    group_size, limit = 0, max_group_bytes((weight.size for weight in weights), group_bytes, parts)
    for weight in again:
        left.remove(weight)
        group_size += weight.size
        # A weight larger than a group of this graph may be a group of its own, as elsewhere.
        if group_size > (limit if group_size > weight.size else group_bytes):
            return
        if any(other.last > weight.first for other in left):
            return
        yield weight


def _within(again: Sequence[_Weight], saved: AbstractSet[_Weight], budget_bytes: float) -> list[_Weight]:
    """Return weights to keep within a budget, greedily by saved waiting time per byte.

    Ties go to the first in backward, which lives for the shortest time.
    """
    fits = [place for place, weight in enumerate(again) if weight not in saved and weight.size <= budget_bytes]
    if sum(again[place].size for place in fits) <= budget_bytes:
        return [again[place] for place in fits]
    waits = BackwardWaits([weight.size for weight in again], [weight in saved for weight in again])
    chosen: list[_Weight] = []
    # Lazy evaluation: the worth of a weight only decreases, so a weight whose worth equals its recorded one is the
    # best.
    noted = [(-waits.of(place) / again[place].size, place) for place in fits]
    heapify(noted)
    while noted:
        before, place = heappop(noted)
        weight = again[place]
        if weight.size > budget_bytes:
            continue
        worth = -waits.of(place) / weight.size
        if worth > before:  # both are negative: it is worth less
            heappush(noted, (worth, place))
            continue
        chosen.append(weight)
        waits.keep(place)
        budget_bytes -= weight.size
    return chosen


def _only_view(node: Node) -> bool:
    return is_dequantize(node) or (is_view_or_cast(node) and cast_dtype(node) is None)


def _forms(gather: Node) -> list[Node]:
    """Return the weight in each dtype in which it is used: narrowing casts, and itself."""
    own: torch.dtype = gather.meta["val"].dtype
    narrow = [user for user in gather.users if (cast_dtype(user) or own).itemsize < own.itemsize]
    return narrow + ([gather] if len(narrow) < len(gather.users) else [])


def backward_nodes(graph: Graph) -> set[Node]:
    """Return the nodes of a joint graph that depend on tangents."""
    tangents = [node for node in graph.find_nodes(op="placeholder") if node.name.startswith(TANGENTS)]
    found = set(tangents)
    for node in tangents:  # the list grows
        for user in node.users:
            if user not in found and user.op != "output":
                found.add(user)
                tangents.append(user)
    return found


_Span = tuple[float, float]  # composition of weights in order: (a, b) stands for min(lead - a, b)
_NOTHING: _Span = (0.0, inf)


class BackwardWaits:
    """Time, in transferred bytes, that backward waits for each weight, for a growing set of kept weights.

    Transfers are queued from the beginning of backward. Computing with a weight takes as long as its transfer. The lead
    of a weight (0 or less) is the end of the transfers before it minus the time at which compute is free. A kept weight
    lengthens the lead by its size; a gathered one limits it to ``min(lead, -size)``. Both have the form ``min(lead - a,
    b)``, which composes, so a segment tree answers and updates in logarithmic time. Keeping a weight never shortens a
    lead.

    Args:
        sizes: bytes of each weight, in the order in which backward uses them.
    """

    def __init__(self, sizes: Sequence[int], kept: Sequence[bool]) -> None:
        self._sizes = sizes
        self._leaves = 1 << max(len(sizes) - 1, 0).bit_length()
        self._tree: list[_Span] = [_NOTHING] * (2 * self._leaves)  # children of node n are 2 n and 2 n + 1
        for place, (size, keeps) in enumerate(zip(sizes, kept, strict=True)):
            self._tree[self._leaves + place] = _kept(size) if keeps else (0.0, float(-size))
        for node in reversed(range(1, self._leaves)):
            self._join(node)

    def of(self, place: int) -> float:
        """Return the wait for a weight that is gathered again."""
        return max(self._lead(place) + self._sizes[place], 0.0)

    def keep(self, place: int) -> None:
        """Keep a weight from now on."""
        node = self._leaves + place
        self._tree[node] = _kept(self._sizes[place])
        while node := node // 2:
            self._join(node)

    def _lead(self, place: int) -> float:
        lead, node = 0.0, 1
        half = self._leaves
        while node < self._leaves:
            half //= 2
            node *= 2
            if place & half:
                a, b = self._tree[node]
                lead, node = min(lead - a, b), node + 1
        return lead

    def _join(self, node: int) -> None:
        (a, b), (later_a, later_b) = self._tree[2 * node], self._tree[2 * node + 1]
        self._tree[node] = a + later_a, min(b - later_a, later_b)


def _kept(size: int) -> _Span:
    return float(size), inf
