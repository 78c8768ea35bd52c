"""Moves each gather, with the views and casts of its weight, to where the weight is first used.

A backward graph lists what it computes again in an order of the partitioner's. Passes that group and start gathers read
the order of the gathers as the order of use.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Graph, Node

from lightning_zero.compile.graph import gathers, is_view_or_cast

__all__ = ["sink", "sink_gathers"]


def sink_gathers(graph: Graph) -> Graph:
    """Reorders nodes in place; what is computed stays the same."""
    return sink(graph, gathers(graph))


def sink(graph: Graph, nodes: Sequence[Node]) -> Graph:
    """The same for some nodes."""
    position = {node: i for i, node in enumerate(graph.nodes)}
    for node in nodes:
        chain, first = _chain_and_first_use(node, position)
        if first is None:
            continue
        for link in chain:
            first.prepend(link)
    return graph


def _chain_and_first_use(node: Node, position: dict[Node, int]) -> tuple[list[Node], Node | None]:
    """The gather and everything that only reshapes or casts it, in order, and the first node that uses any of them for
    real."""
    chain, uses = {node: None}, []
    pending = [node]
    while pending:
        for user in pending.pop().users:
            if is_view_or_cast(user) and user.args[0] in chain and len(user.all_input_nodes) == 1:
                if user not in chain:
                    chain[user] = None
                    pending.append(user)
            else:
                uses.append(user)
    first = min(uses, key=position.__getitem__, default=None)
    ordered = sorted(chain, key=position.__getitem__)
    return [link for link in ordered if first is None or position[link] < position[first]], first
