"""Chooses the gathered weights that live from forward to backward instead of being gathered twice.

Small ones always: saving a bias costs next to nothing, and its transfer would be one more at the beginning of backward,
where nothing hides it. Others as far as a budget reaches, the last ones first: they are needed first in backward, and
live for the shortest time.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from lightning_zero.compile.graph import cast_dtype, gathers, readers, shard_of
from lightning_zero.profiling.tensors import nbytes

__all__ = ["after_tangents", "choose_kept"]


def choose_kept(graph: Graph, small_bytes: int, budget_bytes: float) -> list[Node]:
    """The nodes of a joint graph to save for backward: gathers, or the casts of gathers that are used.

    Args:
        small_bytes: weights of at most this size, in the dtype that is saved, are kept whatever the budget.
        budget_bytes: for all others together. One that does not fit is skipped, a smaller one may follow.
    """
    backward = after_tangents(graph)
    # A tied weight is one for the compiler, too, which will see that it is read twice.
    forms: dict[tuple[object, torch.dtype], list[Node]] = {}
    for gather in reversed(gathers(graph)):
        for node in _forms(gather):
            forms.setdefault((shard_of(gather), node.meta["val"].dtype), []).append(node)
    kept: list[Node] = []
    left = budget_bytes
    for nodes in forms.values():
        size = nbytes(nodes[0].meta["val"])
        if not any(user in backward for node in nodes for user in readers(node)):
            continue
        if size > small_bytes:
            if size > left:
                continue
            left -= size
        kept += nodes
    return kept


def _forms(gather: Node) -> list[Node]:
    """The weight in each dtype it is used in: its narrowing casts, and itself where it is used as it is."""
    own: torch.dtype = gather.meta["val"].dtype
    narrow = [user for user in gather.users if (cast_dtype(user) or own).itemsize < own.itemsize]
    return narrow + ([gather] if len(narrow) < len(gather.users) else [])


def after_tangents(graph: Graph) -> set[Node]:
    """What a joint graph computes in backward: all that depends on gradients of the outputs."""
    found = {node for node in graph.find_nodes(op="placeholder") if node.name.startswith("tangents")}
    for node in graph.nodes:
        if node.op != "output" and any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found
