"""Groups gathers that are used one after the other, and starts each group before it is used.

One launch for a group costs what one launch for a weight costs, and a large transfer reaches the bandwidth that small
ones do not. The first groups are small: nothing hides them, and compute begins when the first has arrived. The weights
of a group arrive in one tensor and are views of it: nothing is copied. By default at most two full groups are in flight
or in use, next to the small weights, which are gathered at the beginning and kept. See ``prefetch_schedule.py`` for
when a group is started.

Ranks may compile graphs of the same weights at different times and for batches of different lengths. All must gather
the same groups in the same order, so a graph follows the plan that the ranks have agreed on, if there is one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import Graph, Node

from lightning_zero.compat.graphs import RECOMPUTE
from lightning_zero.compat.ops import wait_tensor
from lightning_zero.compile.graph import gathers, ops, readers, shard_of, weight_name
from lightning_zero.compile.passes.grouping import GroupLimits, dtype_of, groups_of_plan, size_of, split_into_groups
from lightning_zero.compile.passes.prefetch_schedule import PrefetchBudget, prefetch_schedule
from lightning_zero.compile.plan import GraphPlan
from lightning_zero.compile.successors import NodeReplacer
from lightning_zero.native.ops import Op, Role, register_op
from lightning_zero.profiling.cost_model import CostModel
from lightning_zero.profiling.graph_tensors import FakeBuffer

__all__ = ["group_gathers"]


def _whole_group(shards: list[Tensor], dtype: torch.dtype, numel: int) -> Tensor:
    return shards[0].new_empty(numel, dtype=dtype)


register_op(Op("gather_group", shards=0, fake=_whole_group, role=Role.START))

_slice = torch.ops.aten.slice.Tensor
_view = torch.ops.aten.view.default

Group = list[Node]


def group_gathers(
    graph: Graph,
    world_size: int,
    limits: GroupLimits,
    ahead: int = 1,
    agreed_plans: Sequence[GraphPlan] = (),
    costs: CostModel | None = None,
    window_bytes: float | None = None,
) -> Graph:
    """Replaces gathers by groups, in place.

    Args:
        world_size: number of shards that make a weight.
        limits: how large the groups get.
        ahead: a group is started when the one that comes ``ahead`` before it is first waited for.
        agreed: plans of graphs that ran before; one for the same weights is followed.
        costs: estimates by which groups are started earlier or later than ``ahead`` says.
        window_bytes: earlier only while at most so many bytes of groups are in flight or in use; by default two groups.
    """
    nodes = gathers(graph)
    if not nodes:
        return graph
    small = [node for node in nodes if size_of(node) <= limits.small_bytes]
    large = [node for node in nodes if size_of(node) > limits.small_bytes]
    limit = limits.max_group_bytes(map(size_of, large))
    groups = groups_of_plan(graph, nodes, agreed_plans, resident=False)
    if groups is None:
        groups = [*_by_dtype(small), *split_into_groups(large, limit, size_of, _kind, limits.first)]
    at_once = [all(size_of(node) <= limits.small_bytes for node in group) for group in groups]
    budget = None
    # Launches of weights that stay until the step lie in between. The order of all launches must be the same on every
    # rank, so it may not depend on estimates: those groups and these are started one group ahead.
    if costs is not None and not graph.find_nodes(op="call_function", target=ops("resident_start")):
        sizes = [sum(_padded(node, world_size) * dtype_of(node).itemsize for node in group) for group in groups]
        budget = PrefetchBudget(costs, sizes, 2 * limit if window_bytes is None else window_bytes)
    begin, waits = prefetch_schedule(graph, groups, at_once, ahead, budget)
    memory = [_memory(group, world_size) for group in groups]
    launches = [_start(graph, *each) for each in zip(groups, memory, begin, strict=True)]
    views = NodeReplacer(graph)
    for each in zip(groups, memory, launches, waits, strict=True):
        _use(graph, views, *each, world_size)
    views.done()
    return graph


def _by_dtype(nodes: list[Node]) -> list[Group]:
    groups: dict[torch.dtype, Group] = {}
    for node in nodes:
        groups.setdefault(dtype_of(node), []).append(node)
    return list(groups.values())


def _memory(group: Group, world_size: int) -> FakeBuffer:
    return FakeBuffer(group[0].meta["val"], sum(_padded(node, world_size) for node in group))


def _start(graph: Graph, group: Group, memory: FakeBuffer, before: Node) -> Node:
    with graph.inserting_before(before):
        start = graph.call_function(
            ops("gather_group"), ([shard_of(node) for node in group], dtype_of(group[0]), memory.numel)
        )
    start.meta["val"] = memory.part(0, [memory.numel])
    start.meta["weights"] = tuple(weight_name(node) for node in group)
    start.meta["until"] = "backward" if any(map(_kept, group)) else "last use"
    return start


def _use(
    graph: Graph, views: NodeReplacer, group: Group, memory: FakeBuffer, start: Node, before: Node, world_size: int
) -> None:
    """Waits for a group before its first use, and makes each weight a view of it."""
    with graph.inserting_before(before):
        ready = graph.call_function(wait_tensor, (start,))
    ready.meta["val"] = start.meta["val"]
    offset = 0
    for node in group:
        shape = list(node.meta["val"].shape)
        numel = math.prod(shape)
        with graph.inserting_before(node):
            flat = graph.call_function(_slice, (ready, 0, offset, offset + numel))
            weight = graph.call_function(_view, (flat, shape))
        flat.meta["val"] = memory.part(offset, [numel])
        weight.meta.update({key: meta for key, meta in node.meta.items() if key not in (RECOMPUTE, "val")})
        weight.meta["val"] = flat.meta["val"] if len(shape) == 1 else memory.part(offset, shape)
        views.replace(node, weight)
        offset += _padded(node, world_size)


def _padded(node: Node, world_size: int) -> int:
    """Elements of a gathered weight, as it arrives."""
    return world_size * int(shard_of(node).meta["val"].numel())


def _kept(node: Node) -> bool:
    """Whether the graph returns the weight: then all that lies in the same memory lives until backward."""
    return any(user.op == "output" for user in readers(node))


def _kind(node: Node) -> tuple[torch.dtype, bool]:
    return dtype_of(node), _kept(node)
