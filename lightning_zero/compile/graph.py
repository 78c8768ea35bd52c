"""What several passes and reports ask of FX graphs: which nodes are gathers, reduces, views, casts, and of what.

Our ops are looked up by :func:`ops`; a pass that alone is concerned with one of torch's ops names it itself."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from lightning_zero.compat.graphs import CUSTOM, TANGENTS
from lightning_zero.compat.ops import OpOverload, to_copy, unsafe_view
from lightning_zero.native.ops import OPS, Op, Role, graph_overloads, find_op

__all__ = [
    "GATHER",
    "REDUCE",
    "WEIGHT",
    "find_calls",
    "calls",
    "cast_dtype",
    "first_call",
    "gathers",
    "nodes_in_role",
    "is_op",
    "is_reduce",
    "is_start",
    "is_view_or_cast",
    "output_node",
    "graph_kind",
    "ops",
    "readers",
    "reduces",
    "results",
    "shard_of",
    "weight_name",
    "weight_nodes",
]

GATHER = "gather"
REDUCE = "reduce"
WEIGHT = "lightning_zero.weight"  # key in node.meta[CUSTOM], which tracing carries from graph to graph

_aten = torch.ops.aten
_CASTS = {
    to_copy,
    _aten.clone.default,  # weight.t().contiguous(): as large as the weight
    unsafe_view,
    torch.ops.prims.convert_element_type.default,
    _aten.detach.default,
    _aten.alias.default,
    _aten.lift_fresh_copy.default,
}


def ops(name: str) -> OpOverload:
    """One of our ops by its short name."""
    return OPS[name].overload


def gathers(graph: Graph) -> list[Node]:
    """All nodes that read a whole parameter, in order."""
    return find_calls(graph, [OPS[GATHER]])


def reduces(graph: Graph) -> list[Node]:
    """All nodes that hand a gradient over, in order."""
    return find_calls(graph, [OPS[REDUCE]])


def nodes_in_role(graph: Graph, *roles: Role) -> list[Node]:
    """All nodes that call ops of ours in such a role, in order."""
    return find_calls(graph, [op for op in OPS.values() if op.role in roles])


def find_calls(graph: Graph, rows: Iterable[Op]) -> list[Node]:
    """All nodes that call these ops of ours, in order. The graph is asked, which keeps nodes by what they call: passes
    ask a dozen times, and of a graph of many layers nearly all nodes call something else."""
    found: list[Node] = []
    for target in (target for op in rows for target in graph_overloads(op)):
        found += graph.find_nodes(op="call_function", target=target, sort=False)
    return sorted(found)


def calls(node: Node, name: str) -> bool:
    """Whether a node calls our op of this short name, or what stands for it on paper."""
    return node.op == "call_function" and find_op(node.target) is OPS[name]


def shard_of(node: Node) -> Node:
    """The graph's input that a gather or a reduce belongs to."""
    op = find_op(node.target)
    shard = node.args[op.shards if op is not None else 0]
    assert isinstance(shard, Node)
    return shard


def weight_name(node: Node) -> str:
    """The parameter that a gather or a reduce belongs to; in graphs not made by Dynamo, the input's own name."""
    return node.meta.get(CUSTOM, {}).get(WEIGHT) or shard_of(node).name


def weight_nodes(graph: Graph) -> set[Node]:
    """Gathers, and their views and casts: a weight, in whatever form."""
    forms = gathers(graph)
    found = set(forms)
    for form in forms:  # which grows
        for user in form.users:
            if user not in found and is_view_or_cast(user) and user.args and user.args[0] is form:
                found.add(user)
                forms.append(user)
    return found


def is_op(node: Node) -> bool:
    """Whether a node calls an op of the dispatcher."""
    return node.op == "call_function" and isinstance(node.target, OpOverload)


def is_start(node: Node) -> bool:
    """Whether a node launches all-gathers."""
    return _role(node) is Role.START


def is_reduce(node: Node) -> bool:
    """Whether a node hands gradients over, after the passes."""
    return _role(node) is Role.REDUCE


def _role(node: Node) -> Role:
    op = find_op(node.target)
    return Role.OTHER if op is None else op.role


def graph_kind(graph: Graph) -> str:
    """``"backward"`` when a graph, after partitioning, is given gradients of a forward graph's outputs, otherwise
    ``"forward"``."""
    inputs = graph.find_nodes(op="placeholder")
    return "backward" if any(node.name.startswith(TANGENTS) for node in inputs) else "forward"


def first_call(graph: Graph) -> Node:
    """The first node that is no input."""
    return next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))


def readers(node: Node) -> Iterator[Node]:
    """All users of a node and of its views. A narrowing or widening cast is a user, and what uses it is not."""
    pending = [node]
    while pending:
        for user in pending.pop().users:
            yield user
            if is_view_or_cast(user) and cast_dtype(user) is None:
                pending.append(user)


def output_node(graph: Graph) -> Node:
    return next(iter(reversed(graph.nodes)))


def results(graph: Graph) -> list[Any]:
    """What the graph returns: nodes, and what is none."""
    returned = output_node(graph).args[0]
    assert isinstance(returned, tuple | list)
    return list(returned)


def cast_dtype(node: Node) -> torch.dtype | None:
    """The dtype this node casts its input to, when that is all it does."""
    if node.op != "call_function":
        return None
    if node.target is torch.ops.prims.convert_element_type.default:
        return node.args[1] if isinstance(node.args[1], torch.dtype) else None
    if node.target is to_copy and set(node.kwargs) <= {"dtype", "layout", "device"}:
        dtype, source = node.kwargs.get("dtype"), node.args[0]
        assert isinstance(source, Node)
        moved = node.kwargs.get("device", source.meta["val"].device) != source.meta["val"].device
        return dtype if isinstance(dtype, torch.dtype) and not moved else None
    return None


def is_view_or_cast(node: Node) -> bool:
    """Whether the node's result is its first input's memory in another shape, or its values in another order, dtype."""
    target = node.target
    if target is operator.getitem and isinstance(node.args[0], Node):
        return is_view_or_cast(node.args[0])  # a part of a weight that was split or chunked
    if node.op != "call_function" or not isinstance(target, OpOverload):
        return False
    if target in _CASTS:
        return True
    arguments = target._schema.arguments
    return bool(arguments) and arguments[0].alias_info is not None and not arguments[0].alias_info.is_write
