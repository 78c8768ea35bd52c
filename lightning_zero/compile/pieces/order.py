"""The work of a graph in the order in which pieces do it, and what a cut at each place in it would cost."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from functools import cached_property

from torch.fx import Graph, Node

from lightning_zero.compile.pieces.kinds import Asked, Kind, all_read, is_kernel, is_pointwise, is_random
from lightning_zero.profiling.cost import Flops
from lightning_zero.profiling.tensors import nbytes

__all__ = ["Order", "graph_work"]

# A pointwise op is done late only if what it reads is at most so many times as large as what it makes.
GROWTH = 2


class Order:
    """Graph order, but for pointwise ops, each of which comes right before its first reader, or, where nothing in the
    graph reads it, right behind what it reads: so it is seldom on the other side of a cut, and does not become a kernel
    of its own.

    Args:
        graph: is not changed.
        kinds: of its nodes.

    Attributes:
        kinds: of all nodes.
        work: nodes, in order.
        place: of each.
    """

    def __init__(self, graph: Graph, kinds: dict[Node, Kind]) -> None:
        self.kinds = kinds
        self._graph = graph
        self._is_kernel = Asked(is_kernel)
        self._bytes = Asked(lambda node: nbytes(node.meta.get("val")))
        before = list(graph_work(graph, kinds))
        self._end = _first_impure(before)  # what is written in place must not be read later than before, or earlier
        self._moved: set[Node] = set()
        self.work: Sequence[Node] = self._raised(self._sunk(before))
        self.place = {node: number for number, node in enumerate(self.work)}

    def between(self, graph: Graph) -> dict[Node, int]:
        """For each node that runs between pieces: before which place it stands in the graph."""
        at: dict[Node, int] = {}
        following = len(self.work)
        for node in reversed(graph.nodes):
            if self.kinds[node] is Kind.BETWEEN:
                at[node] = following
            elif node in self.place and node not in self._moved:
                following = min(following, self.place[node])
        return dict(reversed(at.items()))

    def effort(self) -> list[int]:
        """Of each node, for comparison: floating-point operations of kernels, nothing for others."""
        flops = Flops()
        return [flops.of(node) if self._is_kernel[node] else 0 for node in self.work]

    def written(self) -> int:
        """Bytes of all results of kernels."""
        return sum(self._bytes[node] for node in self.work if self._is_kernel[node])

    def seams(self) -> list[int]:
        """Places where a kernel ends or begins anyway, in order."""
        pairs = zip(self.work, self.work[1:], strict=False)
        return [
            number
            for number, (before, behind) in enumerate(pairs, 1)
            if behind.target is not operator.getitem and (self._is_kernel[before] or self._is_kernel[behind])
        ]

    def lost(self) -> list[int]:
        """Bytes that a cut right before each node, and behind the last, would send through memory besides what is
        written there anyway."""
        change = [0] * (len(self.work) + 2)
        for number, node in enumerate(self.work):
            last, written = self._read_by(node)
            if not written and last > number:
                size = self._bytes[node]
                change[number + 1] += size
                change[last + 1] -= size
        lost: list[int] = []
        for difference in change[:-1]:
            lost.append((lost[-1] if lost else 0) + difference)
        return lost

    def _read_by(self, node: Node) -> tuple[int, bool]:
        """Place of the last work that reads a node, and whether its result lies in memory in any case."""
        readers = list(self._readers(node))
        work = [user for user in readers if user in self.place]
        last = max((self.place[user] for user in work), default=self.place[node])
        # Readers before and behind a kernel cannot be made together with it.
        apart = len({self._level[user] for user in work}) > 1
        return last, apart or len(work) < len(readers) or any(self._is_kernel[one] for one in (node, *work))

    @cached_property
    def _level(self) -> dict[Node, int]:
        """How many kernels, one after the other, come before each node."""
        levels: dict[Node, int] = {}
        for node in self._graph.nodes:
            levels[node] = max((levels[read] + self._is_kernel[read] for read in node.all_input_nodes), default=0)
        return levels

    def _readers(self, node: Node) -> Iterator[Node]:
        """Of a node and its views."""
        for user in node.users:
            if self.kinds[user] is Kind.FREE:
                yield from self._readers(user)
            else:
                yield user

    def _sunk(self, before: Sequence[Node]) -> list[Node]:
        first = {node: number for number, node in enumerate(before)}
        moved: dict[int, list[Node]] = {}  # last first
        for node in reversed(before[: self._end]):
            to = min((first.get(user, -1) for user in self._readers(node)), default=-1)
            if first[node] + 1 < to <= self._end and self._can_wait(node):
                first[node] = to
                moved.setdefault(to, []).append(node)
        return self._rearranged(before, {to: nodes[::-1] for to, nodes in moved.items()})

    def _raised(self, before: Sequence[Node]) -> list[Node]:
        """What a forward makes of each layer for its backward alone stands behind the last layer, in one piece, which
        would have more nodes with each layer."""
        place = {node: number for number, node in enumerate(before)}
        moved: dict[int, list[Node]] = {}
        unread = self._unread(before[: self._end])

        def at(node: Node) -> int:
            return place.get(node, len(before))

        for node in before:
            needed = list(all_read(node, self.kinds)) if node in unread else []
            # Made earlier it lies there for longer: no more than what waits for it, and for nothing else.
            waiting = [read for read in needed if max(map(at, self._readers(read))) <= place[node]]
            if not waiting or self._bytes[node] > sum(self._bytes[read] for read in waiting):
                continue
            behind = max(map(at, needed))
            while behind + 1 < len(before) and before[behind + 1].target is operator.getitem:
                behind += 1
            if behind + 1 < place[node]:
                place[node] = behind
                moved.setdefault(behind + 1, []).append(node)
        return self._rearranged(before, moved)

    def _rearranged(self, before: Sequence[Node], moved: dict[int, list[Node]]) -> list[Node]:
        """``moved``: nodes, in order, by the place in ``before`` right before which they come."""
        gone = {node for nodes in moved.values() for node in nodes}
        self._moved |= gone
        order: list[Node] = []
        for number, node in enumerate(before):
            order += moved.get(number, [])
            if node not in gone:
                order.append(node)
        return order

    def _unread(self, nodes: Sequence[Node]) -> set[Node]:
        """Pointwise ops that nothing in the graph reads, but for one another."""
        found: set[Node] = set()
        for node in reversed(nodes):
            readers = self._readers(node)
            if is_pointwise(node) and all(user in found or self.kinds[user] is Kind.OUTPUT for user in readers):
                found.add(node)
        return found

    def _can_wait(self, node: Node) -> bool:
        if not is_pointwise(node) or is_random(node):
            return False
        return sum(self._bytes[read] for read in node.all_input_nodes) <= GROWTH * int(self._bytes[node])


def _first_impure(nodes: Sequence[Node]) -> int:
    """Place of the first that does more than it returns, random numbers aside."""
    return next((number for number, node in enumerate(nodes) if node.is_impure(impure_random=False)), len(nodes))


def graph_work(graph: Graph, kinds: dict[Node, Kind]) -> Iterator[Node]:
    """A graph's work in its own order; parts of a result right behind it."""
    for node in graph.nodes:
        if kinds[node] is Kind.WORK and node.target is not operator.getitem:
            yield node
            yield from _parts(node)


def _parts(node: Node) -> Iterator[Node]:
    for user in node.users:
        if user.target is operator.getitem:
            yield user
            yield from _parts(user)
