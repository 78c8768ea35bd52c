"""Keeps whole weights from crossing from forward to backward.

The partitioner decides what a forward graph saves for its backward. Left alone it saves gathered weights, and the
memory of ZeRO-3 is that of ZeRO-2. Tagging each gather, and every view and cast of one, as to be recomputed makes the
backward gather again. A few weights are worth their memory: they are tagged as to be saved.
"""

from __future__ import annotations

import re
import sys
from collections import Counter

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from lightning_zero.compat.graphs import AC_GRAPH_ID, MUST_BE_IN_BACKWARD, NN_MODULE_STACK, PARTITIONER_TAG, RECOMPUTE
from lightning_zero.compile.draws import draws
from lightning_zero.compile.graph import is_op, reduces, shard_of, weight_nodes
from lightning_zero.compile.passes.saved_weights import NOTHING_SAVED, SavedLimits, backward_nodes, choose_saved
from lightning_zero.compile.regions import save_region_boundaries
from lightning_zero.config import RecomputePolicy
from lightning_zero.profiling.graph_tensors import is_view, nbytes

__all__ = ["tag_activations", "tag_random_ops", "tag_gathers"]

# Regions of activation checkpointing count up from 1. The partitioner saves what goes from one into a later one; a
# weight that several read must not be.
OUTSIDE, OF_WEIGHTS = 1, sys.maxsize


def tag_activations(graph: Graph, recompute: RecomputePolicy) -> Graph:
    """Tags what a user's policy has an opinion on, in place; runs after :func:`tag_gathers`, whose tags stay.

    Ops that draw random numbers are left out, which would draw others, and views: to save one is to save its input, and
    where torch has them depends on its version.
    """
    backward = backward_nodes(graph)
    for node in graph.nodes:
        if node.op != "call_function" or node in backward or RECOMPUTE in node.meta or not is_op(node):
            continue
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or torch.Tag.nondeterministic_seeded in node.target.tags or is_view(node):
            continue
        again = recompute(str(node.target), nbytes(value), _module_path(node))
        if again is not None:
            node.meta.setdefault(AC_GRAPH_ID, OUTSIDE)
            node.meta[RECOMPUTE] = CheckpointPolicy.MUST_RECOMPUTE if again else CheckpointPolicy.MUST_SAVE
    return graph


def tag_random_ops(graph: Graph) -> bool:
    """Tags what draws random numbers as to be saved, in place; whether anything does. Under a budget torch computes it
    again like anything else, outside of users' regions: backward would go by other numbers than forward. What gives
    several values cannot be saved as one thing; it is among what a solver may choose, which does."""
    backward = backward_nodes(graph)
    drawn = [
        node
        for node in graph.nodes
        if node.op == "call_function" and node not in backward and RECOMPUTE not in node.meta and draws(node)
    ]
    for node in drawn:
        if isinstance(node.meta.get("val"), Tensor):
            node.meta.setdefault(AC_GRAPH_ID, OUTSIDE)
            node.meta[RECOMPUTE] = CheckpointPolicy.MUST_SAVE
    return bool(drawn)


def _module_path(node: Node) -> str:
    """Of the innermost module, as in ``named_modules()`` of the module that is compiled."""
    stack = node.meta.get(NN_MODULE_STACK) or {}
    path = next(reversed(stack.values()), ("",))[0] if stack else ""
    # Dynamo writes "L['module'].layers.0", "getattr(L['module'].layers, '0')" or "L['module']._modules['layers']".
    while (plain := re.sub(r"getattr\(([^()]*(?:\([^()]*\))?[^()]*), '([^']+)'\)", r"\1.\2", path)) != path:
        path = plain
    path = re.sub(r"\._modules\['([^']+)'\]", r".\1", path)
    return re.sub(r"^[LG]\['\w+'\]\.?", "", path)


def tag_gathers(graph: Graph, keep: SavedLimits = NOTHING_SAVED) -> Graph:
    """Tags a joint forward and backward graph, in place; within ``keep``, weights cross all the same."""
    tagged = weight_nodes(graph)
    if not tagged:
        return graph
    kept = set(choose_saved(graph, keep))
    save_region_boundaries(graph, tagged)
    for node in graph.nodes:
        # The partitioner honours tags only among nodes that carry a region number.
        if node.op == "call_function" and AC_GRAPH_ID not in node.meta:
            node.meta[AC_GRAPH_ID] = OUTSIDE
        if node in tagged:
            node.meta[AC_GRAPH_ID] = OF_WEIGHTS
            node.meta[RECOMPUTE] = CheckpointPolicy.MUST_SAVE if node in kept else CheckpointPolicy.MUST_RECOMPUTE
    seen: Counter[Node] = Counter()
    for node in reduces(graph):
        # Equal calls become one from here on. Two equal gradients of a tied weight (of ``head(x) + other(x)``) are two.
        if number := seen[shard_of(node)]:
            node.args = (*node.args[:2], number)
        seen[shard_of(node)] += 1
        # A gradient that does not depend on the loss (zeros, what a custom function makes up) could else be handed over
        # in forward.
        node.meta[PARTITIONER_TAG] = MUST_BE_IN_BACKWARD
    return graph
