"""Group gathers into one launch each, start groups before their use, and use cached weights.

A large transfer reaches bandwidth that small ones do not. The first groups are small, since nothing hides them. Weights
of a group arrive in one tensor and are views of it. By default at most two full groups are in flight or in use, in
addition to small weights, which are gathered first and kept. ``prefetch_schedule.py`` places the starts.

Groups depend only on weights, their order of use and sizes, and follow the agreed plan if there is one. Ranks may
compile the same weights at different times for other batch shapes, but must launch equal groups in equal order.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from lightning_zero.compat.graphs import RECOMPUTE
from lightning_zero.compat.tensors import wait_tensor
from lightning_zero.compile.fx_utils import NodeReplacer, gathers, graph_kind, ops, readers, shard_of, weight_name
from lightning_zero.compile.graph_plan import GraphPlan
from lightning_zero.compile.passes.prefetch_schedule import PrefetchBudget, prefetch_schedule
from lightning_zero.native.ops import Op, Role, no_result, register_op
from lightning_zero.profiling.cost_model import CostModel
from lightning_zero.profiling.graph_tensors import FakeBuffer, nbytes


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
    """Replace gathers by groups, in place.

    Args:
        ahead: a group starts at the first wait of the group this many groups earlier.
        agreed_plans: plans of earlier graphs; one for the same weights is followed.
        window_bytes: bound on bytes of groups in flight or in use for earlier starts; None for two groups.
    """
    nodes = gathers(graph)
    if not nodes:
        return graph
    small = [node for node in nodes if size_of(node) <= limits.small_bytes]
    large = [node for node in nodes if size_of(node) > limits.small_bytes]
    limit = limits.max_group_bytes(map(size_of, large))
    groups = groups_of_plan(graph, nodes, agreed_plans, cached=False)
    if groups is None:
        groups = [*_by_dtype(small), *split_into_groups(large, limit, size_of, _kind, limits.first)]
    at_once = [all(size_of(node) <= limits.small_bytes for node in group) for group in groups]
    budget = None
    # Launches that fill the unsharded cache are interleaved. Launch order must be equal on all ranks and cannot depend
    # on estimates, so both kinds start one group ahead.
    if costs is not None and not graph.find_nodes(op="call_function", target=ops("cached_gather_start")):
        sizes = [sum(_padded(node, world_size) * dtype_of(node).itemsize for node in group) for group in groups]
        budget = PrefetchBudget(costs, sizes, 2 * limit if window_bytes is None else window_bytes)
    begin, waits = prefetch_schedule(graph, groups, at_once, ahead, budget)
    memory = [_memory(group, world_size) for group in groups]
    launches = [_start(graph, *each) for each in zip(groups, memory, begin, strict=True)]
    views = NodeReplacer(graph)
    for each in zip(groups, memory, launches, waits, strict=True):
        _insert_wait(graph, views, *each, world_size)
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
    start.meta["until"] = "backward" if any(map(_is_returned, group)) else "last use"
    return start


def _insert_wait(
    graph: Graph, views: NodeReplacer, group: Group, memory: FakeBuffer, start: Node, before: Node, world_size: int
) -> None:
    """Wait for a group before its first use, and make each weight a view of it."""
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
    return world_size * int(shard_of(node).meta["val"].numel())


def _is_returned(node: Node) -> bool:
    """Return True if the graph returns the weight, so that its group's memory lives until backward."""
    return any(user.op == "output" for user in readers(node))


def _kind(node: Node) -> tuple[torch.dtype, bool]:
    return dtype_of(node), _is_returned(node)


@dataclass(frozen=True)
class GroupLimits:
    """Bounds on the size of groups of gathers.

    Attributes:
        group_bytes: bound on bytes per group; a larger weight is a group of its own.
        small_bytes: weights up to this size are gathered together at the beginning.
        parts: minimum number of groups, for graphs with few weights.
        first: shares of the bound for the first groups, see :func:`split_into_groups`.
    """

    group_bytes: int
    small_bytes: int = 0
    parts: int = 1
    first: tuple[float, ...] = ()

    def max_group_bytes(self, sizes: Iterable[int]) -> int:
        """Return the bound in bytes for groups of weights of these sizes."""
        return max_group_bytes(sizes, self.group_bytes, self.parts)


def split_into_groups(
    nodes: Sequence[Node],
    limit: int,
    size: Callable[[Node], int],
    kind: Callable[[Node], Any] = lambda node: None,
    first: Sequence[float] = (),
) -> list[Group]:
    """Split nodes into groups of one kind and at most ``limit`` bytes; a larger node is alone.

    Args:
        first: shares of ``limit`` for the first groups; 0 for a single node.
    """
    groups: list[Group] = []
    held, most = 0, 0.0
    for node in nodes:
        if not groups or held + size(node) > most or kind(groups[-1][0]) != kind(node):
            most = limit * first[len(groups)] if len(groups) < len(first) else limit
            groups.append([])
            held = 0
        groups[-1].append(node)
        held += size(node)
    return groups


def max_group_bytes(sizes: Iterable[int], group_bytes: int, parts: int) -> int:
    """Return ``group_bytes``, or less to get about ``parts`` groups."""
    return min(group_bytes, max(sum(sizes) // parts, 1))


def groups_of_plan(
    graph: Graph, nodes: Sequence[Node], agreed_plans: Sequence[GraphPlan], cached: bool
) -> list[Group] | None:
    """Return the groups of exactly these weights in an agreed plan; None without such a plan."""
    mine = Counter((weight_name(node), dtype_name(dtype_of(node))) for node in nodes)
    for plan in agreed_plans:
        gathers = [gather for gather in plan.gathers if (gather.until == "step") is cached]
        if plan.kind != graph_kind(graph) or mine != Counter((name, g.dtype) for g in gathers for name in g.weights):
            continue
        waiting: dict[tuple[str, str], deque[Node]] = {}
        for node in nodes:
            waiting.setdefault((weight_name(node), dtype_name(dtype_of(node))), deque()).append(node)
        return [[waiting[name, g.dtype].popleft() for name in g.weights] for g in gathers]
    return None


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(node: Node) -> torch.dtype:
    dtype = node.args[2]
    assert isinstance(dtype, torch.dtype)
    return dtype


def size_of(node: Node) -> int:
    """Return the bytes of a gathered weight without padding."""
    return nbytes(node.meta["val"])


register_op(Op("cached_gather_start", shards=1, fake=no_result, role=Role.START, has_effect=True))
register_op(Op("cached_gather_wait", shards=1, fake=no_result, has_effect=True))


def use_unsharded_cache(
    graph: Graph, limits: GroupLimits, ahead: int = 1, agreed_plans: Sequence[GraphPlan] = ()
) -> Graph:
    """Replace ``gather(shard, shape, dtype, cache)`` by ``cache``, in place, after ops that fill it.

    The cache is a graph input. The first forward after a step fills it, one group ahead; later the ops do
    nothing. A gather in a narrower dtype becomes a cast of it (an embedding tied to the head); one in a wider dtype
    stays.

    Args:
        limits: bounds on group sizes; small and first groups do not apply.
        ahead: see :func:`group_gathers`.
        agreed_plans: see :func:`group_gathers`.
    """
    firsts: dict[Node, Node] = {}  # maps memory to its first reader
    for node in gathers(graph):
        node = _in_memory_dtype(graph, node)
        cache = _cache_memory(node)
        if cache is not None and cache.meta["val"].dtype == dtype_of(node):
            firsts.setdefault(cache, node)
        else:
            node.args = node.args[:3]
    if not firsts:
        return graph
    nodes = list(firsts.values())
    groups = groups_of_plan(graph, nodes, agreed_plans, cached=True)
    if groups is None:
        groups = split_into_groups(nodes, limits.max_group_bytes(map(size_of, nodes)), size_of, dtype_of)
    begin, waits = prefetch_schedule(graph, groups, [False] * len(groups), ahead)
    for op, anchors in (("cached_gather_start", begin), ("cached_gather_wait", waits)):
        for group, anchor in zip(groups, anchors, strict=True):
            with graph.inserting_before(anchor):
                call = graph.call_function(
                    ops(op), ([_cache_memory(node) for node in group], [shard_of(node) for node in group])
                )
            call.meta["val"] = None
            call.meta["weights"] = tuple(weight_name(node) for node in group)
    held = NodeReplacer(graph)
    for node in gathers(graph):
        memory = _cache_memory(node)
        if memory is not None:
            held.replace(node, memory)
    held.done()
    return graph


def _in_memory_dtype(graph: Graph, node: Node) -> Node:
    """Return a gather in the dtype of the cache, followed by a cast if that is wider."""
    memory = _cache_memory(node)
    own = dtype_of(node)
    if memory is None:
        return node
    held = memory.meta["val"].dtype
    if not (held.is_floating_point and own.is_floating_point and held.itemsize > own.itemsize):
        return node
    shard, shape, _, cache = node.args
    with graph.inserting_before(node):
        wide = graph.call_function(ops("gather"), (shard, shape, held, cache))
        # After decompositions Inductor accepts no other cast.
        cast = graph.call_function(torch.ops.prims.convert_element_type.default, (wide, own))
    wide.meta, cast.meta = dict(node.meta), {"val": node.meta["val"]}
    wide.meta["val"] = node.meta["val"].new_empty(node.meta["val"].shape, dtype=held)
    node.replace_all_uses_with(cast)
    graph.erase_node(node)
    return wide


def _cache_memory(node: Node) -> Node | None:
    cache = node.args[3] if len(node.args) > 3 else None
    assert cache is None or isinstance(cache, Node)
    return cache
