"""Order the compute nodes of a graph, and find the cost of a cut at each position."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import accumulate

from torch.fx import Graph, Node

from lightning_zero.compile.subgraphs.node_kinds import NodeKind, all_read, is_kernel, is_pointwise, is_random, readers
from lightning_zero.compile.subgraphs.subgraph import NodeSignatures
from lightning_zero.profiling.graph_tensors import nbytes, nodes_where
from lightning_zero.profiling.node_costs import FlopCache

# Sink a pointwise op only if its inputs are at most this many times larger than its result.
MAX_GROWTH = 2


class NodeOrder:
    """Graph order in which pointwise ops are next to their first reader.

    Pointwise ops without a reader in the graph follow their inputs. This way they are seldom cut off from the kernel
    with which Inductor fuses them.

    Args:
        graph: not modified.
        signatures: of its nodes; shared to avoid computing them again.

    Attributes:
        work: compute nodes in order.
        place: position of each in ``work``.
    """

    def __init__(self, graph: Graph, kinds: dict[Node, NodeKind], signatures: NodeSignatures | None = None) -> None:
        self.kinds = kinds
        self._graph = graph
        self._signatures = NodeSignatures() if signatures is None else signatures
        self._readers = readers(graph, kinds)
        self._bytes = _Bytes()
        before = graph_work(graph, kinds)
        self._kernels = nodes_where(before, is_kernel)
        self._pointwise = nodes_where(before, is_pointwise)
        self._end = _first_impure(before)  # moving reads across an in-place write would change results
        self._moved: set[Node] = set()
        self.work: Sequence[Node] = self._hoist_unread(self._sink_pointwise(before))
        self.place = {node: number for number, node in enumerate(self.work)}

    def between(self, graph: Graph) -> dict[Node, int]:
        """Return the position in ``work`` before which each communication node is in the graph."""
        at: dict[Node, int] = {}
        following = len(self.work)
        for node in reversed(graph.nodes):
            if self.kinds[node] is NodeKind.COMM:
                at[node] = following
            elif node in self.place and node not in self._moved:
                following = self.place[node] if self.place[node] < following else following
        return dict(reversed(at.items()))

    def effort(self) -> list[int]:
        """Return the floating-point operations of each compute node; 0 for nodes that are no kernels."""
        flops, known = FlopCache(), {}
        for node in self.work:
            if node in self._kernels and self._signatures[node] not in known:
                known[self._signatures[node]] = flops.of(node)
        return [known[self._signatures[node]] if node in self._kernels else 0 for node in self.work]

    def written(self) -> int:
        """Return the bytes of all kernel results."""
        return sum([self._bytes[node] for node in self.work if node in self._kernels])

    def cut_points(self) -> list[int]:
        """Return the positions at which a kernel begins or ends."""
        pairs = zip(self.work, self.work[1:], strict=False)
        return [
            number
            for number, (before, behind) in enumerate(pairs, 1)
            if behind.target is not operator.getitem and (before in self._kernels or behind in self._kernels)
        ]

    def lost(self) -> list[int]:
        """Return the bytes that a cut before each node, and after the last, would add to memory writes."""
        change = [0] * (len(self.work) + 2)
        levels = self._levels()
        for number, node in enumerate(self.work):
            last = number if node in self._kernels else self._read_last(node, number, levels)
            if last > number:
                size = self._bytes[node]
                change[number + 1] += size
                change[last + 1] -= size
        return list(accumulate(change[:-1]))

    def _read_last(self, node: Node, number: int, levels: dict[Node, int]) -> int:
        """Return the position of the last reader of a node; its own if the result is written to memory anyway."""
        last, level = number, None
        for user in self._readers[node]:
            if user not in self.place or user in self._kernels:
                return number
            # Readers before and after a kernel cannot be fused with the node.
            if level is not None and levels[user] != level:
                return number
            level = levels[user]
            if self.place[user] > last:
                last = self.place[user]
        return last

    def _levels(self) -> dict[Node, int]:
        """Return the number of kernels on the longest path before each node."""
        levels: dict[Node, int] = dict.fromkeys(self._graph.nodes, 0)
        for node in self._graph.nodes:
            behind = levels[node] + (node in self._kernels)
            for user in node.users:
                if levels[user] < behind:
                    levels[user] = behind
        return levels

    def _sink_pointwise(self, before: Sequence[Node]) -> list[Node]:
        first = {node: number for number, node in enumerate(before)}
        moved: dict[int, list[Node]] = {}  # in reverse order
        for node in reversed(before[: self._end]):
            to = self._end + 1
            for user in self._readers[node]:
                at = first.get(user, -1)
                if at < to:
                    to = at
            if first[node] + 1 < to <= self._end and self._can_wait(node):
                first[node] = to
                moved.setdefault(to, []).append(node)
        return self._rearranged(before, {to: nodes[::-1] for to, nodes in moved.items()})

    def _hoist_unread(self, before: Sequence[Node]) -> list[Node]:
        """Move ops that forward computes only for backward to their layer.

        Otherwise they all follow the last layer, in one subgraph that grows with the number of layers.
        """
        place = {node: number for number, node in enumerate(before)}
        moved: dict[int, list[Node]] = {}
        unread = self._unread_pointwise(before[: self._end])

        def at(node: Node) -> int:
            return place.get(node, len(before))

        for node in before:
            needed = list(all_read(node, self.kinds)) if node in unread else []
            # Moved ops keep their result longer. Move one only if it frees at least as much input memory.
            waiting = [read for read in needed if max(map(at, self._readers[read])) <= place[node]]
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
        """Move nodes before the positions in ``before`` that are their keys in ``moved``."""
        if not moved:
            return list(before)
        gone = {node for nodes in moved.values() for node in nodes}
        self._moved |= gone
        order: list[Node] = []
        for number, node in enumerate(before):
            if number in moved:
                order += moved[number]
            if node not in gone:
                order.append(node)
        return order

    def _unread_pointwise(self, nodes: Sequence[Node]) -> set[Node]:
        """Return pointwise ops that only other such ops or the output read."""
        found: set[Node] = set()
        for node in reversed(nodes):
            if node not in self._pointwise:
                continue
            for user in self._readers[node]:
                if user not in found and self.kinds[user] is not NodeKind.OUTPUT:
                    break
            else:
                found.add(node)
        return found

    def _can_wait(self, node: Node) -> bool:
        if node not in self._pointwise or is_random(node):
            return False
        return sum([self._bytes[read] for read in node.all_input_nodes]) <= MAX_GROWTH * self._bytes[node]


class _Bytes(dict[Node, int]):
    def __missing__(self, node: Node) -> int:
        found = self[node] = nbytes(node.meta.get("val"))
        return found


def _first_impure(nodes: Sequence[Node]) -> int:
    impure = nodes_where(nodes, lambda node: node.is_impure(impure_random=False))
    for number, node in enumerate(nodes):
        if node in impure:
            return number
    return len(nodes)


def graph_work(graph: Graph, kinds: dict[Node, NodeKind]) -> list[Node]:
    """Return the compute nodes in graph order, each followed by the items of its result."""
    work: list[Node] = []
    for node in graph.nodes:
        if kinds[node] is NodeKind.COMPUTE and node.target is not operator.getitem:
            work.append(node)
            for user in node.users:
                if user.target is operator.getitem:
                    work += _parts(user)
    return work


def _parts(node: Node) -> list[Node]:
    parts = [node]
    for user in node.users:
        if user.target is operator.getitem:
            parts += _parts(user)
    return parts
