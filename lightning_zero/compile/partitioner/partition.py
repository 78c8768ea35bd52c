"""Partition joint graphs into forward and backward, and tag which values are saved.

Left alone, the partitioner saves gathered weights, and ZeRO-3 needs the memory of ZeRO-2. Tagging gathers and their
views and casts as recomputed makes backward gather again. Checkpointed regions save their boundaries, as in eager code.
"""

from __future__ import annotations

import operator
import re
import sys
from collections import Counter
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from functorch.compile import config as functorch_config
from functorch.compile import min_cut_rematerialization_partition as min_cut_partition
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from lightning_zero.compat.fast_partitioner import fast_partitioner
from lightning_zero.compat.graphs import AC_GRAPH_ID, MUST_BE_IN_BACKWARD, NN_MODULE_STACK, PARTITIONER_TAG, RECOMPUTE
from lightning_zero.compile.fx_utils import (
    REDUCE,
    calls,
    cast_dtype,
    draws_random,
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
from lightning_zero.compile.passes.dequantize import narrow_dequantized
from lightning_zero.compile.passes.prepare import cast_before_views
from lightning_zero.compile.passes.saved_weights import NOTHING_SAVED, SavedLimits, backward_nodes, choose_saved
from lightning_zero.config import RecomputePolicy
from lightning_zero.profiling.graph_tensors import is_view, nbytes

Partition = Callable[..., tuple[GraphModule, GraphModule]]


def partition_joint_graph(
    module: GraphModule, inputs: Any, outputs: int, budget: float, by: Partition = min_cut_partition, **settings: Any
) -> tuple[GraphModule, GraphModule, list[GraphModule]]:
    """Return forward and backward, and those of them that need new code after torch's partition.

    Call it within :func:`~lightning_zero.compile.partitioner.recompute_policy.partitioner_settings` of the same budget.
    """
    # Random ops become seeds in Inductor's joint-graph passes, so they are tagged here.
    save_random_ops(module.graph, budget)
    forward, backward = fast_partitioner(by)(module, inputs, num_fwd_outputs=outputs, **settings)
    changed = [forward] if save_mutated_buffers(forward.graph, outputs) else []
    if budget < 1 and save_residual_sums(forward.graph, backward.graph, outputs):
        changed = [forward, backward]
    return forward, backward, changed


# Region ids count up from 1. The partitioner saves values that pass into later regions, which weights must not be.
OUTSIDE, OF_WEIGHTS = 1, sys.maxsize


MIN_BUDGET = 1e-6  # budget close to 0


def save_random_ops(graph: Graph, budget: float) -> None:
    """Make torch's partitioner save random ops; call it right before, with the same budget."""
    # With a budget of exactly 0 torch ignores tags.
    if budget < 1 and tag_random_ops(graph) and budget == 0:
        functorch_config.activation_memory_budget = MIN_BUDGET


def tag_activations(graph: Graph, recompute: RecomputePolicy) -> Graph:
    """Apply a user's recompute policy to a joint graph in place, after :func:`tag_gathers`.

    Random ops are excluded, since recomputed ones give other numbers. Views are excluded because saving one saves its
    input, and because their positions depend on torch's version.
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
    """Tag random ops as saved, in place, and return True if there are any.

    Under a budget torch recomputes them outside of users' regions, and backward would use other numbers. Ops with
    several results cannot be tagged; the knapsack saves them.
    """
    backward = backward_nodes(graph)
    drawn = [
        node
        for node in graph.nodes
        if node.op == "call_function" and node not in backward and RECOMPUTE not in node.meta and draws_random(node)
    ]
    for node in drawn:
        if isinstance(node.meta.get("val"), Tensor):
            node.meta.setdefault(AC_GRAPH_ID, OUTSIDE)
            node.meta[RECOMPUTE] = CheckpointPolicy.MUST_SAVE
    return bool(drawn)


def _module_path(node: Node) -> str:
    """Return the path of the innermost module, as in ``named_modules()`` of the compiled module."""
    stack = node.meta.get(NN_MODULE_STACK) or {}
    path = next(reversed(stack.values()), ("",))[0] if stack else ""
    # Dynamo writes "L['module'].layers.0", "getattr(L['module'].layers, '0')" or "L['module']._modules['layers']".
    while (plain := re.sub(r"getattr\(([^()]*(?:\([^()]*\))?[^()]*), '([^']+)'\)", r"\1.\2", path)) != path:
        path = plain
    path = re.sub(r"\._modules\['([^']+)'\]", r".\1", path)
    return re.sub(r"^[LG]\['\w+'\]\.?", "", path)


def tag_gathers(graph: Graph, keep: SavedLimits = NOTHING_SAVED) -> Graph:
    """Tag weights in a joint graph as recomputed in place, except those within the limits ``keep``."""
    tagged = weight_nodes(narrow_dequantized(cast_before_views(graph)))
    if not tagged:
        return graph
    kept = set(choose_saved(graph, keep))
    save_region_boundaries(graph, tagged)
    for node in graph.nodes:
        # The partitioner honors tags only on nodes with a region id.
        if node.op == "call_function" and AC_GRAPH_ID not in node.meta:
            node.meta[AC_GRAPH_ID] = OUTSIDE
        if node in tagged:
            node.meta[AC_GRAPH_ID] = OF_WEIGHTS
            node.meta[RECOMPUTE] = CheckpointPolicy.MUST_SAVE if node in kept else CheckpointPolicy.MUST_RECOMPUTE
    seen: Counter[Node] = Counter()
    for node in reduces(graph):
        # CSE merges equal calls from here on, but two equal gradients of a tied weight (of ``head(x) + other(x)``) are
        # two.
        if number := seen[shard_of(node)]:
            node.args = (*node.args[:2], number)
        seen[shard_of(node)] += 1
        # A gradient independent of the loss (zeros of a custom function) could otherwise be reduced in forward.
        node.meta[PARTITIONER_TAG] = MUST_BE_IN_BACKWARD
    return graph


_RECOMPUTED = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def save_region_boundaries(graph: Graph, weights: AbstractSet[Node]) -> Graph:
    """Tag inputs and outputs of checkpointed regions as saved if backward needs them, in place.

    torch's partitioner treats everything inside a region as free to recompute. It would recompute the last region for
    its result, and chains of regions that end in views from the first one on, so checkpointing would save no memory.
    Call it before nodes outside of regions get an id.

    Args:
        weights: gathers and their views and casts, which are not saved.
    """
    if not any(AC_GRAPH_ID in node.meta for node in graph.nodes):
        return graph
    regions: dict[Node, int] = {}  # 0 means none
    for node in _forward(graph):
        # An item of an op's results may have no id of its own.
        source = node.args[0] if node.target is operator.getitem else None
        regions[node] = node.meta.get(AC_GRAPH_ID, regions.get(source, 0) if isinstance(source, Node) else 0)
    for node in regions:
        if node in weights:
            continue
        across = [user for user in node.users if regions.get(user, regions[node]) != regions[node]]
        if across and any(map(_is_recomputed, (node, *across))):
            _save(_base_op(node), weights)
    return graph


def _forward(graph: Graph) -> list[Node]:
    """Return nodes that forward outputs depend on, in order, without those used only by derivatives."""
    backward = backward_nodes(graph)
    needed: set[Node] = set()
    pending = [node for node in output_node(graph).all_input_nodes if node not in backward and not calls(node, REDUCE)]
    while pending:
        node = pending.pop()
        if node not in needed:
            needed.add(node)
            pending += node.all_input_nodes
    return [node for node in graph.nodes if node in needed and node.op == "call_function"]


def _is_recomputed(node: Node) -> bool:
    return node.meta.get(RECOMPUTE) in _RECOMPUTED


def _base_op(node: Node) -> Node:
    """Return the op that allocated a view's memory; torch's partitioner ignores tags on views."""
    while node.target is operator.getitem or (is_view_or_cast(node) and cast_dtype(node) is None):
        source = node.args[0]
        if not isinstance(source, Node):
            break
        node = source
    return node


def _save(node: Node, weights: AbstractSet[Node]) -> None:
    if node.op != "call_function" or node in weights:
        return
    # Items are saved one by one, and the op itself cannot be. None of them may be recomputed.
    for part in (node, *(user for user in node.users if user.target is operator.getitem)):
        part.meta[RECOMPUTE] = CheckpointPolicy.MUST_SAVE


_COPY = torch.ops.aten.copy_.default


def save_mutated_buffers(forward: Graph, outputs: int) -> int:
    """Save a copy of each input that forward mutates, in place, and return their number.

    torch's partitioner treats inputs as free to save. The mutation at the end of forward writes the same memory, so
    backward would use the new values (running means, queues of keys). Gradients would be wrong, as they are under plain
    ``torch.compile``.
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
    # The storage has gaps, and backward was traced for such an input.
    empty = graph.call_function(torch.ops.aten.new_empty_strided.default, (node, value.size(), value.stride()))
    empty.meta["val"] = value.new_empty_strided(value.size(), value.stride())
    filled = graph.call_function(torch.ops.aten.copy.default, (empty, node))
    filled.meta["val"] = empty.meta["val"]
    return filled


def _read_instead(graph: Graph, node: Node, copy: Node, outputs: int) -> None:
    """Replace reads of ``node`` by ``copy``, except in mutations and outputs."""
    keep = {copy, *_edits(node), *copy.all_input_nodes}
    returned = results(graph)
    for user in list(node.users):
        if user.op == "output":
            rest = [copy if value is node else value for value in returned[outputs:]]
            user.args = ((*returned[:outputs], *rest),)
        elif user not in keep:
            user.replace_input_with(node, copy)
