"""How many bytes are alive while a graph runs, node by node.

A node's result is alive from the node on until the last use of it or of any of its views; what the graph returns stays
alive. Every node allocates its whole result: Inductor keeps fused intermediates out of memory and reuses buffers, so
the estimate is an upper bound.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch.fx import Graph, Node

from lightning_zero.profiling.tensors import Storage, storages

__all__ = ["Alive", "MemoryPoint", "MemoryTimeline", "keep_all", "memory_timeline"]


@dataclass(frozen=True)
class MemoryPoint:
    """Bytes alive while one node runs, and after it, when what it read last is gone."""

    name: str
    during: int
    after: int


@dataclass(frozen=True)
class Alive:
    """One tensor that is alive at the peak."""

    name: str
    nbytes: int


@dataclass(frozen=True)
class MemoryTimeline:
    """The memory of a graph.

    Attributes:
        points: one for each node, in the graph's order.
        peak: bytes alive at the peak.
        peak_index: index of the first node at the peak.
        alive: tensors alive at the peak, the largest first.
        held: bytes of inputs that stay alive to the end: they were there before the step began.
    """

    points: tuple[MemoryPoint, ...]
    peak: int
    peak_index: int
    alive: tuple[Alive, ...]
    held: int = 0


def keep_all(node: Node) -> bool:
    """All inputs stay alive: whoever runs the graph holds them."""
    return True


def memory_timeline(graph: Graph, keep: Callable[[Node], bool] = keep_all) -> MemoryTimeline:
    """The bytes alive at each node.

    Args:
        keep: for each of the graph's inputs and constants, whether it stays alive to the end (parameters, batches); an
            activation that was saved for this graph goes with its last use.
    """
    nodes = list(graph.nodes)
    held = storages(graph)
    first, last = _lifetimes(nodes, held, keep)
    coming: dict[int, int] = {}
    going: dict[int, int] = {}
    for storage, index in last.items():
        coming[first[storage]] = coming.get(first[storage], 0) + storage.nbytes
        going[index] = going.get(index, 0) + storage.nbytes
    points, alive = [], 0
    for index, node in enumerate(nodes):
        during = alive + coming.get(index, 0)
        alive = during - going.get(index, 0)
        points.append(MemoryPoint(node.name, during, alive))
    peak = max((point.during for point in points), default=0)
    at = next((index for index, point in enumerate(points) if point.during == peak), 0)
    there = [storage for storage, index in last.items() if first[storage] <= at <= index]
    there.sort(key=lambda storage: (-storage.nbytes, storage.made))
    largest = tuple(Alive(storage.name, storage.nbytes) for storage in there)
    inputs = [node for node in nodes if node.op in ("placeholder", "get_attr") and keep(node)]
    kept = {storage for node in inputs for storage in held[node] if storage is not None}
    return MemoryTimeline(tuple(points), peak, at, largest, sum(storage.nbytes for storage in kept))


def _lifetimes(
    nodes: list[Node], held: dict[Node, tuple[Storage | None, ...]], keep: Callable[[Node], bool]
) -> tuple[dict[Storage, int], dict[Storage, int]]:
    """The indices of the first and of the last node that each storage is alive at."""
    first: dict[Storage, int] = {}
    last: dict[Storage, int] = {}
    end = len(nodes)
    for index, node in enumerate(nodes):
        is_input = node.op in ("placeholder", "get_attr")
        # Inputs are there before the graph runs; what is kept goes at no node.
        for storage in filter(None, held[node]):
            first.setdefault(storage, 0 if is_input else storage.made)
            last[storage] = max(last.get(storage, 0), end if is_input and keep(node) else index)
        until = end if node.op == "output" else index
        for source in node.all_input_nodes:
            for storage in filter(None, held[source]):
                if storage in last:
                    last[storage] = max(last[storage], until)
    return first, last
