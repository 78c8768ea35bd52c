"""What several passes and reports ask of FX graphs: which nodes are gathers, reduces, views, casts, and of what.

Our ops are looked up by :func:`ops`; a pass that alone is concerned with one of torch's ops names it itself."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node, map_arg

from lightning_zero.compat.graphs import CUSTOM, TANGENTS
from lightning_zero.compat.ops import OpOverload, to_copy, unsafe_view
from lightning_zero.compat.tensors import TorchDispatchMode
from lightning_zero.native.ops import OPS, Op, Role, find_op, graph_overloads

__all__ = [
    "ForbidRandomOps",
    "GATHER",
    "NodeReplacer",
    "REDUCE",
    "RandomOpFound",
    "WEIGHT",
    "calls",
    "cast_dtype",
    "draws",
    "find_calls",
    "first_call",
    "format_nodes",
    "gathers",
    "graph_kind",
    "is_numbered",
    "is_op",
    "is_reduce",
    "is_start",
    "is_view_or_cast",
    "nodes_in_role",
    "ops",
    "output_node",
    "readable",
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


class NodeReplacer:
    """Of nodes of a graph.

    Protocol: :meth:`replace` and :meth:`erase`, as often as needed; then :meth:`done`.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._output = output_node(graph)
        self._returned: dict[Node, Node] = {}
        self._gone: list[Node] = []

    def replace(self, node: Node, successor: Node) -> None:
        """Whatever reads ``node`` reads ``successor``, but for the output, which does once all is done. The node is
        erased then."""
        if self._output in node.users:
            self._returned[node] = successor
        node.replace_all_uses_with(successor, delete_user_cb=lambda user: user is not self._output)
        self.erase(node)

    def erase(self, node: Node) -> None:
        """Erases a node that only such nodes read as are replaced or erased before it, once all is done."""
        self._gone.append(node)

    def done(self) -> None:
        """Changes the output, and erases nodes."""
        if self._returned:
            self._output.args = map_arg(self._output.args, lambda node: self._returned.get(node, node))
        for node in self._gone:
            self._graph.erase_node(node)


class RandomOpFound(Exception):
    """A random number would have been drawn."""


class ForbidRandomOps(TorchDispatchMode):
    """A context in which no random number is drawn: an op that would raises :class:`RandomOpFound`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise RandomOpFound(func)
        return func(*args, **(kwargs or {}))


def draws(node: Node) -> bool:
    """Whether a node of a graph of ops does."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def readable(graph: Graph) -> str:
    """A line for each node: its number, name, op, arguments, and the dtype and shape of its result."""
    lines, number = [], 0
    for node, (_, line) in zip(graph.nodes, format_nodes(graph), strict=True):
        shown = str(number) if is_numbered(node) else ""
        number += is_numbered(node)
        lines.append(f"{shown:>5}  {line}\n")
    return "".join(lines)


def format_nodes(graph: Graph) -> Iterator[tuple[str, str]]:
    """Name and line of each node, without its number: that of a node which a pass leaves alone stays the same."""
    for node in graph.nodes:
        shape = _shape(node.meta.get("val"))
        yield node.name, f"{_call(node)}{f'  # {shape}' if shape else ''}"


def is_numbered(node: Node) -> bool:
    """Whether plans number the node."""
    return (
        node.op not in ("placeholder", "get_attr", "output") and str(node.target) != "lightning_zero.check_plan.default"
    )


def _call(node: Node) -> str:
    if node.op == "output":
        return f"return {node.args[0]}"
    if node.op in ("placeholder", "get_attr"):
        return f"{node.name} = {node.op}" + (f" {node.target}" if node.target != node.name else "")
    arguments = [*map(_argument, node.args), *(f"{name}={_argument(value)}" for name, value in node.kwargs.items())]
    target = node.target
    name = str(target) if isinstance(target, str | OpOverload) else getattr(target, "__name__", str(target))
    return f"{node.name} = {name}({', '.join(arguments)})"


def _argument(value: object, most: int = 60) -> str:
    # A plan is announced in a text as long as the plan; other texts are short.
    return f"{value[:most]!r}..." if isinstance(value, str) and len(value) > most else str(value)


def _shape(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, tuple | list):
        return ", ".join(map(_shape, value))
    return "" if value is None else str(value)
