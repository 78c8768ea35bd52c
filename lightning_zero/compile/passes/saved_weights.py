"""Chooses the gathered weights that live from forward to backward instead of being gathered twice.

Small ones always: saving a bias costs next to nothing, and its transfer would be one more at the beginning of backward,
where nothing hides it. The last group of a step's forward, too, when backward needs it first: it is there when forward
ends, and would be wanted again at once. Others as far as a budget reaches, those first that backward would wait for
longest, for their size.

How long that is follows from the weights alone, their order of use and their sizes. Measured bandwidths and the shapes
of batches stay out of it: ranks may have batches of other shapes, and take graphs out of caches that an earlier run
filled, and must still keep, and so gather, the same weights.
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
from lightning_zero.compile.fx_utils import cast_dtype, gathers, is_view_or_cast, readers, shard_of
from lightning_zero.compile.passes.gather_groups import max_group_bytes
from lightning_zero.profiling.tensors import nbytes

__all__ = ["BackwardWaits", "NOTHING_SAVED", "SavedLimits", "backward_nodes", "choose_saved"]


@dataclass(frozen=True)
class SavedLimits:
    """What a graph keeps of its weights from forward to backward.

    Attributes:
        small_bytes: weights of at most this size, in the dtype that is saved, are saved whatever the budget.
        budget_bytes: for all others together. One that does not fit is skipped, a smaller one may follow.
        group_bytes: backward follows right after this graph's forward, and its last group is saved whatever the budget;
            of at most so many bytes. 0: something else comes between.
        parts: smaller groups where the graph gathers little, see :class:`GroupLimits`.
        share: adds this share of what would otherwise be gathered again to the budget.
    """

    small_bytes: int = 0
    budget_bytes: float = 0.0
    group_bytes: int = 0
    parts: int = 1
    share: float = 0.0


NOTHING_SAVED = SavedLimits()


@dataclass(frozen=True, eq=False)
class _Weight:
    """A weight in one dtype that it is used in. A tied one is one for the compiler, too, which sees that it is read
    twice. Positions are of nodes in the joint graph; ``again``: of the first use in backward, None for no use."""

    nodes: list[Node]
    size: int
    first: int
    last: int
    again: int | None


def choose_saved(graph: Graph, limits: SavedLimits) -> list[Node]:
    """The nodes of a joint graph to save for backward: gathers, or the casts of gathers that are used."""
    weights = _weights(graph)
    small = [weight for weight in weights if weight.size <= limits.small_bytes]
    large = [weight for weight in weights if weight.size > limits.small_bytes]
    again = sorted((weight for weight in large if weight.again is not None), key=lambda weight: weight.again or 0)
    saved = {weight for weight in small if weight.again is not None}
    saved.update(_last_group(large, again, limits.group_bytes, limits.parts))
    rest = sum(weight.size for weight in again if weight not in saved)
    saved.update(_within(again, saved, limits.budget_bytes + limits.share * rest))
    return [node for weight in weights if weight in saved for node in weight.nodes]


def _weights(graph: Graph) -> list[_Weight]:
    """Those that forward gathers, the last first."""
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
    """The weights that backward needs first, as long as each is used in forward only after all others.

    Memory is at its highest around there anyway: activations are all saved, and these weights lie in it, at the end of
    forward and at the beginning of backward. So long as they are no more than the group that would be in flight then.
    """
    left = list(weights)
    held, limit = 0, max_group_bytes((weight.size for weight in weights), group_bytes, parts)
    for weight in again:
        left.remove(weight)
        held += weight.size
        # As elsewhere, a weight that is larger than a group of this graph may be one of its own.
        if held > (limit if held > weight.size else group_bytes):
            return
        if any(other.last > weight.first for other in left):
            return
        yield weight


def _within(again: Sequence[_Weight], saved: AbstractSet[_Weight], budget_bytes: float) -> list[_Weight]:
    """What to keep within a budget besides what is ``saved``: one after the other that which saves the most for its
    size, given those before. Of equal ones, the first in backward: they live for the shortest time."""
    fits = [place for place, weight in enumerate(again) if weight not in saved and weight.size <= budget_bytes]
    if sum(again[place].size for place in fits) <= budget_bytes:
        return [again[place] for place in fits]
    waits = BackwardWaits([weight.size for weight in again], [weight in saved for weight in again])
    chosen: list[_Weight] = []
    # What a weight was worth when it was looked at last: it is never worth more later, so whichever still is worth what
    # is noted of it, and is the first, is worth the most of all.
    noted = [(-waits.of(place) / again[place].size, place) for place in fits]
    heapify(noted)
    while noted:
        before, place = heappop(noted)
        weight = again[place]
        if weight.size > budget_bytes:
            continue
        worth = -waits.of(place) / weight.size
        if worth > before:  # both are below zero: it is worth less
            heappush(noted, (worth, place))
            continue
        chosen.append(weight)
        waits.keep(place)
        budget_bytes -= weight.size
    return chosen


def _only_view(node: Node) -> bool:
    return is_view_or_cast(node) and cast_dtype(node) is None


def _forms(gather: Node) -> list[Node]:
    """The weight in each dtype it is used in: its narrowing casts, and itself where it is used as it is."""
    own: torch.dtype = gather.meta["val"].dtype
    narrow = [user for user in gather.users if (cast_dtype(user) or own).itemsize < own.itemsize]
    return narrow + ([gather] if len(narrow) < len(gather.users) else [])


def backward_nodes(graph: Graph) -> set[Node]:
    """What a joint graph computes in backward: all that depends on gradients of the outputs."""
    behind = [node for node in graph.find_nodes(op="placeholder") if node.name.startswith(TANGENTS)]
    found = set(behind)
    for node in behind:  # which grows
        for user in node.users:
            if user not in found and user.op != "output":
                found.add(user)
                behind.append(user)
    return found


_Span = tuple[float, float]  # what weights in a row make of a lead: (a, b) for min(lead - a, b)
_NOTHING: _Span = (0.0, inf)


class BackwardWaits:
    """Of weights in the order in which backward uses them.

    Args:
        sizes: bytes of each.
        kept: which are not gathered again.
    """

    def __init__(self, sizes: Sequence[int], kept: Sequence[bool]) -> None:
        self._sizes = sizes
        self._leaves = 1 << max(len(sizes) - 1, 0).bit_length()
        self._tree: list[_Span] = [_NOTHING] * (2 * self._leaves)  # below node n lie 2 n and 2 n + 1
        for place, (size, keeps) in enumerate(zip(sizes, kept, strict=True)):
            self._tree[self._leaves + place] = _kept(size) if keeps else (0.0, float(-size))
        for node in reversed(range(1, self._leaves)):
            self._join(node)

    def of(self, place: int) -> float:
        """For a weight that is gathered again."""
        return max(self._lead(place) + self._sizes[place], 0.0)

    def keep(self, place: int) -> None:
        """From now on."""
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
