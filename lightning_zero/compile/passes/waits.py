"""How long backward waits for each weight that it gathers again, as more and more of them are kept.

Transfers queue one behind the other from the beginning of backward on. Computing with a weight takes as long as its
transfer: with larger batches more is hidden, with smaller ones less, but the first has nothing to hide behind, and a
large weight behind small ones too little. Times are in bytes that travel.

When a weight's turn comes, all transfers before it end at some moment, which is never behind the one in which compute
is free: their difference is the ``lead``, 0 or less. A kept weight of so many bytes makes the lead longer by as much; a
gathered one cuts it to at most its own size, ``min(lead, -size)``. Either is ``min(lead - a, b)``, and so are any
number of them in a row, so a tree of such pairs says what the lead before each weight is, and takes a change, in a
logarithm of their number. To keep one more makes no lead shorter: nobody waits longer for any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

__all__ = ["BackwardWaits"]

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
