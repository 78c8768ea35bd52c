"""A joint graph becomes a forward and a backward within a budget of activations: what a compiled graph, one that is
only reckoned with and one on paper have in common."""

from __future__ import annotations

import operator
import re
import sys
from collections import Counter
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from lightning_zero.compat.compiler import functorch_config, min_cut_partition
from lightning_zero.compat.cse import cse_in_place
from lightning_zero.compat.cuts import fast_minimum_cut
from lightning_zero.compat.graph_extract import skip_graph_copies
from lightning_zero.compat.graphs import AC_GRAPH_ID, MUST_BE_IN_BACKWARD, NN_MODULE_STACK, PARTITIONER_TAG, RECOMPUTE
from lightning_zero.compile.fx_utils import (
    REDUCE,
    calls,
    cast_dtype,
    draws,
    first_call,
    is_op,
    is_view_or_cast,
    output_node,
    reduces,
    results,
    shard_of,
    weight_nodes,
)
from lightning_zero.compile.partitioner.residual_sums import save_residual_sums
from lightning_zero.compile.passes.saved_weights import NOTHING_SAVED, SavedLimits, backward_nodes, choose_saved
from lightning_zero.config import RecomputePolicy
from lightning_zero.profiling.tensors import is_view, nbytes

__all__ = [
    "partition_joint_graph",
    "save_mutated_buffers",
    "save_region_boundaries",
    "tag_activations",
    "tag_gathers",
    "tag_random_ops",
]


Partition = Callable[..., tuple[GraphModule, GraphModule]]


def partition_joint_graph(
    module: GraphModule, inputs: Any, outputs: int, budget: float, by: Partition = min_cut_partition, **settings: Any
) -> tuple[GraphModule, GraphModule, list[GraphModule]]:
    """Both, and those of them whose graphs were changed behind torch's partition, so that their code is not theirs.

    Within torch's settings of :func:`~lightning_zero.compile.partitioner.recompute_policy.partitioner_settings` the same budget.

    Args:
        module: the joint graph, which is not to be used any more.
        outputs: of forward, which the user, or autograd, gets.
        by: of torch's partitioners.
        settings: for it.
    """
    # Here: Inductor's passes over joint graphs have seeds drawn, which no node before them does.
    save_random_ops(module.graph, budget)
    with fast_minimum_cut(), skip_graph_copies(), cse_in_place():
        forward, backward = by(module, inputs, num_fwd_outputs=outputs, **settings)
    changed = [forward] if save_mutated_buffers(forward.graph, outputs) else []
    if budget < 1 and save_residual_sums(forward.graph, backward.graph, outputs):
        changed = [forward, backward]
    return forward, backward, changed


# Regions of activation checkpointing count up from 1. The partitioner saves what goes from one into a later one; a
# weight that several read must not be.
OUTSIDE, OF_WEIGHTS = 1, sys.maxsize


NEXT_TO_NONE = 1e-6  # a budget


def save_random_ops(graph: Graph, budget: float) -> None:
    """Has torch's partitioner, which divides this joint graph next within :func:`partitioner_settings`, save random numbers."""
    # Of a budget of none at all it heeds no tag.
    if budget < 1 and tag_random_ops(graph) and budget == 0:
        functorch_config.activation_memory_budget = NEXT_TO_NONE


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


_COPY = torch.ops.aten.copy_.default


def save_mutated_buffers(forward: Graph, outputs: int) -> int:
    """Saves a copy in place of each edited input, in place; returns how many there are.

    Args:
        forward: after partitioning.
        outputs: of its results, so many are not saved for backward.
    """
    saved = [node for node in results(forward)[outputs:] if isinstance(node, Node)]
    read = {source for node in saved if (source := _source(node)).op == "placeholder"}
    edited = [node for node in forward.find_nodes(op="placeholder") if node in read and any(_edits(node))]
    for node in edited:
        with forward.inserting_before(first_call(forward)):
            copy = _copied(forward, node)
        _read_instead(forward, node, copy, outputs)
    return len(edited)


def _edits(node: Node) -> list[Node]:
    return [user for user in node.users if user.target is _COPY and user.args[0] is node]


def _source(node: Node) -> Node:
    """In whose memory it lies, or the copy of which it is."""
    while node.target is operator.getitem or (is_view_or_cast(node) and cast_dtype(node) is None):
        [node, *_] = node.all_input_nodes
    return node


def _copied(graph: Graph, node: Node) -> Node:
    value: Tensor = node.meta["val"]
    packed = value.clone()
    if packed.stride() == value.stride():
        copy = graph.call_function(torch.ops.aten.clone.default, (node,))
        copy.meta["val"] = packed
        return copy
    # Its memory has gaps, and backward was traced for such an input.
    empty = graph.call_function(torch.ops.aten.new_empty_strided.default, (node, value.size(), value.stride()))
    empty.meta["val"] = value.new_empty_strided(value.size(), value.stride())
    filled = graph.call_function(torch.ops.aten.copy.default, (empty, node))
    filled.meta["val"] = empty.meta["val"]
    return filled


def _read_instead(graph: Graph, node: Node, copy: Node, outputs: int) -> None:
    """Everywhere but in edits, and in what is returned to whoever calls the graph."""
    keep = {copy, *_edits(node), *copy.all_input_nodes}
    returned = results(graph)
    for user in list(node.users):
        if user.op == "output":
            rest = [copy if value is node else value for value in returned[outputs:]]
            user.args = ((*returned[:outputs], *rest),)
        elif user not in keep:
            user.replace_input_with(node, copy)
