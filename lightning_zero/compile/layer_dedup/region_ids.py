"""Numbers of checkpointed regions in a joint graph: layers that were traced once are regions of their own each."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Node

from lightning_zero.compat.graphs import AC_GRAPH_ID

__all__ = ["RegionIds", "in_region"]

_FIRST = 2  # nodes outside of all regions are given 1


def in_region(node: Node) -> bool:
    return node.meta.get(AC_GRAPH_ID) is not None  # torch may note that there is none


class RegionIds:
    """Gives numbers that grow from one region to the next, as they do where each is traced: the partitioner saves what
    goes from one into another with a larger number. Asked in the order of the graph's forward."""

    def __init__(self) -> None:
        self._last = _FIRST - 1
        self._shift = 0
        self._known: dict[int, int] = {}

    def of(self, number: int) -> int:
        """For a region that was traced with the rest of the graph."""
        if number not in self._known:
            self._known[number] = number + self._shift
            self._last = max(self._last, number + self._shift)
        return self._known[number]

    def of_layer(self, numbers: Sequence[int]) -> dict[int, int]:
        """For those in one layer that was traced by itself."""
        own = {number: self._last + at for at, number in enumerate(sorted(numbers), 1)}
        self._last += len(own)
        self._shift += len(own)
        return own
