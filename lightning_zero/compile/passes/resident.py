"""Weights that stay until the optimizer steps are read where they lie.

Their memory is an input of the graph. The first forward after a step starts gathering them, group after group, while
the group before is in use; later graphs find them there, and the same two calls do nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Graph, Node

from lightning_zero.compile.graph import gathers, ops, shard_of, weight_name
from lightning_zero.compile.passes.grouping import GroupLimits, split_into_groups, dtype_of, groups_of_plan, size_of
from lightning_zero.compile.passes.prefetch_schedule import prefetch_schedule
from lightning_zero.compile.plan import GraphPlan
from lightning_zero.compile.successors import NodeReplacer
from lightning_zero.native.ops import Op, Role, register_op, no_result

__all__ = ["use_resident"]

register_op(Op("resident_start", shards=1, fake=no_result, role=Role.START, has_effect=True))
register_op(Op("resident_wait", shards=1, fake=no_result, has_effect=True))


def use_resident(graph: Graph, limits: GroupLimits, ahead: int = 1, agreed_plans: Sequence[GraphPlan] = ()) -> Graph:
    """``gather(shard, shape, dtype, resident)`` becomes ``resident``, in place, behind calls that see to it that it is
    filled.

    One in a narrower dtype than the memory's becomes a cast of it, as an embedding's that is tied to the head; one in a
    wider dtype stays a gather. Arguments: see :func:`group_gathers`; of the limits,
    small weights and first groups do not matter here: nobody waits for what is there already.
    """
    firsts: dict[Node, Node] = {}  # memory -> its first reader
    for node in gathers(graph):
        node = _in_memory_dtype(graph, node)
        resident = _memory(node)
        if resident is not None and resident.meta["val"].dtype == dtype_of(node):
            firsts.setdefault(resident, node)
        else:
            node.args = node.args[:3]
    if not firsts:
        return graph
    nodes = list(firsts.values())
    groups = groups_of_plan(graph, nodes, agreed_plans, resident=True)
    if groups is None:
        groups = split_into_groups(nodes, limits.max_group_bytes(map(size_of, nodes)), size_of, dtype_of)
    begin, waits = prefetch_schedule(graph, groups, [False] * len(groups), ahead)
    for op, anchors in (("resident_start", begin), ("resident_wait", waits)):
        for group, anchor in zip(groups, anchors, strict=True):
            with graph.inserting_before(anchor):
                call = graph.call_function(
                    ops(op), ([_memory(node) for node in group], [shard_of(node) for node in group])
                )
            call.meta["val"] = None
            call.meta["weights"] = tuple(weight_name(node) for node in group)
    held = NodeReplacer(graph)
    for node in gathers(graph):
        memory = _memory(node)
        if memory is not None:
            held.replace(node, memory)
    held.done()
    return graph


def _in_memory_dtype(graph: Graph, node: Node) -> Node:
    """A gather in the dtype of the weight's memory; where that is wider, with a cast behind it in place of ``node``."""
    memory = _memory(node)
    own = dtype_of(node)
    if memory is None:
        return node
    held = memory.meta["val"].dtype
    if not (held.is_floating_point and own.is_floating_point and held.itemsize > own.itemsize):
        return node
    shard, shape, _, resident = node.args
    with graph.inserting_before(node):
        wide = graph.call_function(ops("gather"), (shard, shape, held, resident))
        # Behind decompositions, where Inductor takes no other.
        cast = graph.call_function(torch.ops.prims.convert_element_type.default, (wide, own))
    wide.meta, cast.meta = dict(node.meta), {"val": node.meta["val"]}
    wide.meta["val"] = node.meta["val"].new_empty(node.meta["val"].shape, dtype=held)
    node.replace_all_uses_with(cast)
    graph.erase_node(node)
    return wide


def _memory(node: Node) -> Node | None:
    resident = node.args[3] if len(node.args) > 3 else None
    assert resident is None or isinstance(resident, Node)
    return resident
