"""Regions of activation checkpointing, in joint graphs: they save what they save in eager code.

That is what comes into a region, and what others need of what leaves it. Torch's partitioner knows only that whatever
is inside is to be computed again, and takes this for free. So it computes the last region to its end, where what it
ends with is needed behind it; and where regions end in a view, each from the results of the one before, and so all of
them before the backward of the last one begins: no memory is saved at all.
"""

from __future__ import annotations

import operator
from collections.abc import Set as AbstractSet

from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from lightning_zero.compat.graphs import RECOMPUTE, AC_GRAPH_ID
from lightning_zero.compile.graph import REDUCE, calls, cast_dtype, is_view_or_cast, output_node
from lightning_zero.compile.passes.saved_weights import backward_nodes

__all__ = ["save_region_boundaries"]

_AGAIN = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def save_region_boundaries(graph: Graph, weights: AbstractSet[Node]) -> Graph:
    """Tags a joint graph, in place: what goes into a checkpointed region, and what leaves one, is not computed again.
    It is saved where backward needs it, or something that was made of it.

    Must come before nodes outside of regions are given a number.

    Args:
        weights: gathers, and their views and casts, which are not saved.
    """
    if not any(AC_GRAPH_ID in node.meta for node in graph.nodes):
        return graph
    regions: dict[Node, int] = {}  # 0: none
    for node in _forward(graph):
        # One of several results of an op may have no number of its own.
        source = node.args[0] if node.target is operator.getitem else None
        regions[node] = node.meta.get(AC_GRAPH_ID, regions.get(source, 0) if isinstance(source, Node) else 0)
    for node in regions:
        if node in weights:
            continue
        across = [user for user in node.users if regions.get(user, regions[node]) != regions[node]]
        if across and any(map(_again, (node, *across))):
            _save(_made_by(node), weights)
    return graph


def _forward(graph: Graph) -> list[Node]:
    """What the results of forward are made of, in order: not what derivatives alone ask for, before they have a
    gradient."""
    backward = backward_nodes(graph)
    needed: set[Node] = set()
    pending = [node for node in output_node(graph).all_input_nodes if node not in backward and not calls(node, REDUCE)]
    while pending:
        node = pending.pop()
        if node not in needed:
            needed.add(node)
            pending += node.all_input_nodes
    return [node for node in graph.nodes if node in needed and node.op == "call_function"]


def _again(node: Node) -> bool:
    return node.meta.get(RECOMPUTE) in _AGAIN


def _made_by(node: Node) -> Node:
    """The op in whose memory this lies: torch's partitioner takes views for free, whatever they are told."""
    while node.target is operator.getitem or (is_view_or_cast(node) and cast_dtype(node) is None):
        source = node.args[0]
        if not isinstance(source, Node):
            break
        node = source
    return node


def _save(node: Node, weights: AbstractSet[Node]) -> None:
    if node.op != "call_function" or node in weights:
        return
    # Several results are saved one by one, and what makes them cannot be: none of them may have to be made again.
    for part in (node, *(user for user in node.users if user.target is operator.getitem)):
        part.meta[RECOMPUTE] = CheckpointPolicy.MUST_SAVE
