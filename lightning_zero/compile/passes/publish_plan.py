"""Insert an op that publishes a graph's plan before its first collective.

The plan is stored in the graph. It is therefore available whether the graph was compiled now, recompiled for another
length, or loaded from a cache that an earlier process filled.
"""

from __future__ import annotations

import logging
from collections.abc import Set as AbstractSet
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch.fx import Graph, Node

from lightning_zero.compat.tensors import wait_tensor
from lightning_zero.compile.fx_utils import (
    LINEAR_PRODUCTS,
    READ_IN_PLACE,
    first_call,
    graph_kind,
    nodes_in_role,
    ops,
    weight_name,
)
from lightning_zero.compile.graph_plan import Gather, GraphPlan, Linear, Reduce
from lightning_zero.compile.passes.gather_groups import dtype_name
from lightning_zero.native.ops import Op, Role, find_op, no_result, register_op
from lightning_zero.profiling.cost_model import CostModel
from lightning_zero.profiling.graph_tensors import nbytes

log = logging.getLogger(__name__)

register_op(Op("check_plan", shards=0, fake=no_result, has_effect=True))

# ops that cut a weight out of its group
_PARTS = (wait_tensor, torch.ops.aten.slice.Tensor, torch.ops.aten.view.default)


def publish_plan(graph: Graph, costs: CostModel | None = None) -> Graph:
    """Insert ``check_plan(shard, digest, plan)`` before the first collective or read of a shard, in place.

    Args:
        graph: after all other passes.
        costs: measured costs, to estimate the plan's seconds; None for a plan without seconds.
    """
    plan = read_plan(graph)
    if costs is not None and (plan.gathers or plan.reduces):
        plan = _estimate_seconds(plan, graph, costs)
    first = next(iter(nodes_in_role(graph, Role.START, Role.REDUCE)), None)
    shard = next((node for node in graph.find_nodes(op="placeholder") if READ_IN_PLACE in node.meta), None)
    if first is not None:
        op = find_op(first.target)
        assert op is not None
        shards: Any = first.args[op.shards]
        shard = shards[0] if isinstance(shards, list | tuple) else shards
    if shard is None:
        return graph
    with graph.inserting_before(first_call(graph)):
        check = graph.call_function(ops("check_plan"), (shard, plan.digest, plan.to_json()))
    check.meta["val"] = None
    return graph


def read_plan(graph: Graph) -> GraphPlan:
    """Return the plan of a graph after the passes."""
    nodes = _counted(graph)
    position = {node: number for number, node in enumerate(nodes)}
    starts = nodes_in_role(graph, Role.START)
    ours = {*starts, *_parts(graph)}
    before, waits = _next_user_nodes(nodes, ours), _cache_waits(graph)
    gathers = tuple(_gather(node, position, before, waits, ours) for node in starts)
    reduces = tuple(_reduce(node, position) for node in nodes_in_role(graph, Role.REDUCE))
    return GraphPlan(graph_kind(graph), len(nodes), gathers, reduces, linears=_linears(graph))


def _linears(graph: Graph) -> tuple[Linear, ...]:
    """Return the products of this graph by weight, which the joint graph's conversion noted."""
    backward = graph_kind(graph) == "backward"
    noted = [node.meta[LINEAR_PRODUCTS] for node in graph.find_nodes(op="placeholder") if LINEAR_PRODUCTS in node.meta]
    found = [
        Linear(name, tuple((kind, dtype) for kind, dtype in products.items() if (kind != "forward") is backward))
        for name, products in noted
    ]
    return tuple(linear for linear in found if linear.products)


def _parts(graph: Graph) -> list[Node]:
    return [part for target in (*_PARTS, ops("cached_gather_wait")) for part in _calls(graph, target)]


def _calls(graph: Graph, target: Any) -> list[Node]:
    return graph.find_nodes(op="call_function", target=target)


def _next_user_nodes(nodes: list[Node], ours: AbstractSet[Node]) -> list[str]:
    """Return for each node the name of the next node that belongs to the user."""
    names, name = [""] * len(nodes), "the end"
    for number in reversed(range(len(nodes))):
        names[number] = name
        node = nodes[number]
        name = name if node in ours else node.name
    return names


def _cache_waits(graph: Graph) -> dict[tuple[Any, ...], Node]:
    waits: dict[tuple[Any, ...], Node] = {}
    for node in _calls(graph, ops("cached_gather_wait")):
        waits.setdefault(_group(node), node)
    return waits


def _group(node: Node) -> tuple[Any, ...]:
    memory, shards = node.args
    return tuple(memory), tuple(shards)  # type: ignore[arg-type]


def _counted(graph: Graph) -> list[Node]:
    check = ops("check_plan")
    apart = ("placeholder", "get_attr", "output")
    return [node for node in graph.nodes if node.op not in apart and node.target is not check]


def _estimate_seconds(plan: GraphPlan, graph: Graph, costs: CostModel) -> GraphPlan:
    """Return the plan with estimated seconds; each gradient has its share of one large transfer."""
    try:
        seconds = dict(zip(graph.nodes, costs.node_seconds(graph), strict=True))
        clock = [0.0, *accumulate(map(seconds.__getitem__, _counted(graph)))]
    except Exception as error:  # an op without an estimate must not fail the compilation
        log.debug("Plan: no estimated seconds (reason=%s: %s)", type(error).__name__, error)
        return plan
    reduced = sum(reduce.bytes for reduce in plan.reduces)
    per_byte = costs.gather_seconds(reduced) / reduced if reduced else 0.0
    gathers = [
        replace(
            gather,
            started_s=clock[gather.started],
            waited_s=clock[gather.waited],
            # The unsharded cache is transferred only in the first pass after an optimizer step.
            transfer_s=0.0 if gather.until == "step" else costs.gather_seconds(gather.bytes),
        )
        for gather in plan.gathers
    ]
    reduces = [
        replace(reduce, at_s=clock[reduce.at + 1], transfer_s=reduce.bytes * per_byte) for reduce in plan.reduces
    ]
    return replace(plan, gathers=tuple(gathers), reduces=tuple(reduces), compute_s=clock[-1])


def _gather(
    start: Node,
    position: dict[Node, int],
    before: list[str],
    cache_waits: dict[tuple[Any, ...], Node],
    ours: AbstractSet[Node],
) -> Gather:
    cached = start.target is ops("cached_gather_start")
    if cached:
        waits = [wait] if (wait := cache_waits.get(_group(start))) is not None else []
        values = [memory.meta["val"] for memory in start.args[0]]  # type: ignore[union-attr]
    else:
        waits = [user for user in start.users if user.target is wait_tensor]
        values = [start.meta["val"]]
    waited = position[waits[0]] if waits else position[start]
    read = waits if not cached else start.all_input_nodes if waits else []
    readers = [user for memory in read for user in _uses(memory, ours)]
    uses = sorted((user for user in readers if position[user] > waited), key=position.__getitem__)
    return Gather(
        weights=start.meta.get("weights") or (weight_name(start),),
        dtype=dtype_name(values[0].dtype),
        bytes=nbytes(values),
        started=position[start],
        before=before[position[start]],
        waited=waited,
        used=uses[0].name if uses else "nothing",
        until="step" if cached else start.meta.get("until", "last use"),
    )


def _uses(memory: Node, ours: AbstractSet[Node]) -> list[Node]:
    found, pending = [], [memory]
    while pending:
        for user in pending.pop().users:
            if user.target in _PARTS:
                pending.append(user)
            elif user.op != "output" and user not in ours:
                found.append(user)
    return found


def _reduce(node: Node, position: dict[Node, int]) -> Reduce:
    grads: Any = node.args[0] if isinstance(node.args[0], list | tuple) else [node.args[0]]
    names = node.meta.get("weights") or (weight_name(node),)
    values = [grad.meta["val"] for grad in grads]
    return Reduce(tuple(names), dtype_name(values[0].dtype), nbytes(values), position[node])
