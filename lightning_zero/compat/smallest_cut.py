"""The smallest cut of a network that falls apart into small parts, of which most are alike: that of a joint graph, once
what forward has to make, and what backward has to, are left out of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import inf
from typing import Any

import networkx
from networkx.algorithms.flow import boykov_kolmogorov
from networkx.algorithms.flow import minimum_cut as cut_of_all

__all__ = ["minimum_cut"]

# A part's edges between its nodes, by their numbers, and capacities.
Part = tuple[tuple[tuple[int, int], Any], ...]
SOURCE, SINK = -1, -2


def minimum_cut(network: Any, source: Any, sink: Any) -> tuple[Any, tuple[set[Any], set[Any]]]:
    """What ``networkx.minimum_cut`` returns, its value and both sides: of the smallest cuts that which is next to the
    sink, of which there is one.

    Raises:
        networkx.NetworkXUnbounded: nothing that may be cut is between source and sink.
    """
    before, behind = _bound(network.succ, source), _bound(network.pred, sink)
    if not before.isdisjoint(behind):
        return cut_of_all(network, source, sink, flow_func=boykov_kolmogorov)  # which raises it
    value = sum(_capacity(edge) for node in before for to, edge in network.succ[node].items() if to in behind)
    known: dict[Part, tuple[Any, frozenset[int]]] = {}
    for nodes in _parts(network, before, behind):
        part = _edges(network, nodes, before, behind)
        if part not in known:
            known[part] = _cut(part)
        cost, beyond = known[part]
        value += cost
        behind |= {nodes[number] for number in beyond}
    return value, (set(network) - behind, behind)


def _bound(edges: Mapping[Any, Mapping[Any, Any]], start: Any) -> set[Any]:
    """What no cut parts from ``start``."""
    found, waiting = {start}, [start]
    while waiting:
        for node, edge in edges[waiting.pop()].items():
            if node not in found and _capacity(edge) == inf:
                found.add(node)
                waiting.append(node)
    return found


def _capacity(edge: Mapping[str, Any]) -> Any:
    return edge.get("capacity", inf)


def _parts(network: Any, before: set[Any], behind: set[Any]) -> Iterator[list[Any]]:
    """What hangs together without the two; equal parts that were made in the same order, in the same order."""
    found = before | behind
    for first in network:
        if first in found:
            continue
        found.add(first)
        part = [first]
        for node in part:  # which grows
            for to in (*network.succ[node], *network.pred[node]):
                if to not in found:
                    found.add(to)
                    part.append(to)
        yield part


def _edges(network: Any, nodes: list[Any], before: set[Any], behind: set[Any]) -> Part:
    numbers = {node: number for number, node in enumerate(nodes)}
    edges: dict[tuple[int, int], Any] = {}
    for number, node in enumerate(nodes):
        for to, edge in network.succ[node].items():
            if to not in before:
                between = number, numbers.get(to, SINK)
                edges[between] = edges.get(between, 0) + _capacity(edge)
        for read, edge in network.pred[node].items():
            if read in before:
                edges[SOURCE, number] = edges.get((SOURCE, number), 0) + _capacity(edge)
    return tuple(edges.items())


def _cut(part: Part) -> tuple[Any, frozenset[int]]:
    """What it costs, and the nodes on the sink's side."""
    network: Any = networkx.DiGraph()
    network.add_nodes_from((SOURCE, SINK))
    network.add_edges_from((*between, {"capacity": capacity}) for between, capacity in part)
    value, (_, beyond) = cut_of_all(network, SOURCE, SINK, flow_func=boykov_kolmogorov)
    return value, frozenset(beyond) - {SINK}
