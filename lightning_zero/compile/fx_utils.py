"""Helpers for FX graphs: queries of our ops, views and casts, node replacement, random ops, and text."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node, map_arg

from lightning_zero.compat.graphs import CUSTOM, TANGENTS
from lightning_zero.compat.tensors import OpOverload, TorchDispatchMode, to_copy, unsafe_view
from lightning_zero.native.ops import OPS, Op, Role, find_op, graph_overloads
from lightning_zero.sharding.weight_format import DEQUANTIZE

GATHER = "gather"
REDUCE = "reduce"
# Key in the meta of a shard's graph input: kind of product -> "fp8", or why it stays in 16 bits. Inputs keep their meta
# from the joint graph to forward and backward, and through Inductor's passes.
LINEAR_PRODUCTS = "lightning_zero.linear_products"
READ_IN_PLACE = "lightning_zero.read_in_place"  # key in the meta of a shard's graph input that is read without a gather
WEIGHT_VIEW = "weight_view"
ON_HOST = "lightning_zero.on_host"  # key in node.meta[CUSTOM] of gathers whose shards are in host memory
WEIGHT = "lightning_zero.weight"  # key in node.meta[CUSTOM], which tracing copies from graph to graph

_aten = torch.ops.aten
TRANSPOSES = (_aten.t.default, _aten.permute.default, _aten.transpose.int)
_CASTS = {
    to_copy,
    _aten.clone.default,  # weight.t().contiguous() is as large as the weight
    unsafe_view,
    torch.ops.prims.convert_element_type.default,
    _aten.detach.default,
    _aten.alias.default,
    _aten.lift_fresh_copy.default,
}


def ops(name: str) -> OpOverload:
    """Return one of our ops by its short name."""
    return OPS[name].overload


def gathers(graph: Graph) -> list[Node]:
    """Return all nodes that gather a parameter, in order."""
    return find_calls(graph, [OPS[GATHER]])


def reduces(graph: Graph) -> list[Node]:
    """Return all nodes that pass a gradient to the executor, in order."""
    return find_calls(graph, [OPS[REDUCE]])


def nodes_in_role(graph: Graph, *roles: Role) -> list[Node]:
    """Return all nodes that call our ops of these roles, in order."""
    return find_calls(graph, [op for op in OPS.values() if op.role in roles])


def find_calls(graph: Graph, rows: Iterable[Op]) -> list[Node]:
    """Return all nodes that call these ops, in order.

    It uses the graph's index by target: passes ask often, and most nodes call other targets.
    """
    found: list[Node] = []
    for target in (target for op in rows for target in graph_overloads(op)):
        found += graph.find_nodes(op="call_function", target=target, sort=False)
    return sorted(found)


def calls(node: Node, name: str) -> bool:
    """Return True if a node calls our op of this short name or its fake counterpart."""
    return node.op == "call_function" and find_op(node.target) is OPS[name]


def shard_of(node: Node) -> Node:
    """Return the graph input of a gather's or a reduce's shard."""
    op = find_op(node.target)
    shard = node.args[op.shards if op is not None else 0]
    assert isinstance(shard, Node)
    return shard


def weight_name(node: Node) -> str:
    """Return the parameter name of a gather or reduce; the input's name without Dynamo."""
    return node.meta.get(CUSTOM, {}).get(WEIGHT) or shard_of(node).name


@dataclass(frozen=True)
class InPlaceReads:
    """Describes which weights the graphs of one rank read without a copy.

    They read its shards, which are whole weights, and the executor's copies of them in other dtypes.

    Attributes:
        dtypes: of the copies that the executor keeps: compute shards and fp8 shards.
    """

    dtypes: frozenset[torch.dtype]

    def covers(self, gather: Node) -> bool:
        """Return True if a gather's result can be memory that the executor keeps.

        A gather into the unsharded cache has its own. Each kernel would read a shard on the host over the link.
        """
        if any(arg is not None for arg in gather.args[3:]):
            return False
        if self.covers_shard(gather):
            return not gather.meta.get(CUSTOM, {}).get(ON_HOST)
        return gather.args[2] in self.dtypes

    @staticmethod
    def covers_shard(gather: Node) -> bool:
        """Return True if a gather has the dtype of its shard."""
        return bool(gather.args[2] == shard_of(gather).meta["val"].dtype)

    def covers_form(self, form: Node) -> bool:
        """Return True if a gather is read in place, or a cast of one that becomes a gather in its dtype."""
        if calls(form, GATHER):
            return self.covers(form)
        return cast_dtype(form) in self.dtypes


def views_and_casts(weight: Node) -> list[Node]:
    """Return a node, and all views and casts of it and of each other."""
    found = [weight]
    for form in found:  # the list grows
        found += [user for user in form.users if is_view_or_cast(user) and user not in found]
    return found


def users_of_forms(weight: Node) -> set[Node]:
    """Return all users of a node, and of all views and casts of it."""
    return {user for form in views_and_casts(weight) for user in form.users}


def weight_views(graph: Graph) -> dict[Node, list[Node]]:
    """Return the nodes that view the executor's copy of a weight, by the graph input of its shard."""
    found: dict[Node, list[Node]] = {}
    for view in find_calls(graph, [OPS[WEIGHT_VIEW]]):
        found.setdefault(shard_of(view), []).append(view)
    return found


def is_dequantize(node: Node) -> bool:
    """Return True if a node computes a frozen weight from a packed one."""
    return node.op == "call_function" and node.target is DEQUANTIZE


def weight_nodes(graph: Graph) -> set[Node]:
    """Return gathers, what is dequantized from them, and views and casts of both."""
    forms = gathers(graph)
    found = set(forms)
    for form in forms:  # the list grows
        for user in form.users:
            if user in found or not user.args or user.args[0] is not form:
                continue
            if is_view_or_cast(user) or is_dequantize(user):
                found.add(user)
                forms.append(user)
    return found


def is_op(node: Node) -> bool:
    return node.op == "call_function" and isinstance(node.target, OpOverload)


def is_start(node: Node) -> bool:
    return _role(node) is Role.START


def is_reduce(node: Node) -> bool:
    """Return True if a node passes gradients to the executor, after the passes."""
    return _role(node) is Role.REDUCE


def _role(node: Node) -> Role:
    op = find_op(node.target)
    return Role.OTHER if op is None else op.role


def graph_kind(graph: Graph) -> str:
    """Return "backward" if a partitioned graph has tangents as inputs, else "forward"."""
    inputs = graph.find_nodes(op="placeholder")
    return "backward" if any(node.name.startswith(TANGENTS) for node in inputs) else "forward"


def first_call(graph: Graph) -> Node:
    return next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))


def readers(node: Node) -> Iterator[Node]:
    """Yield all users of a node, of its views and of weights dequantized from it.

    Dtype casts are yielded, their users are not.
    """
    pending = [node]
    while pending:
        for user in pending.pop().users:
            yield user
            if is_dequantize(user) or (is_view_or_cast(user) and cast_dtype(user) is None):
                pending.append(user)


def output_node(graph: Graph) -> Node:
    return next(iter(reversed(graph.nodes)))


def results(graph: Graph) -> list[Any]:
    returned = output_node(graph).args[0]
    assert isinstance(returned, tuple | list)
    return list(returned)


def cast_dtype(node: Node) -> torch.dtype | None:
    """Return the dtype to which a node casts its input if it does nothing else, else None."""
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
    """Return True if the result has the values of the first input in another shape, order or dtype."""
    target = node.target
    if target is operator.getitem and isinstance(node.args[0], Node):
        return is_view_or_cast(node.args[0])  # part of a weight that was split or chunked
    if node.op != "call_function" or not isinstance(target, OpOverload):
        return False
    if target in _CASTS:
        return True
    arguments = target._schema.arguments
    return bool(arguments) and arguments[0].alias_info is not None and not arguments[0].alias_info.is_write


def narrowing_casts(source: Node) -> list[tuple[Node, tuple[Node, ...]]]:
    """Return narrowing floating-point casts of a node and of its views, each with the views in order."""
    itemsize = source.meta["val"].dtype.itemsize
    found: list[tuple[Node, tuple[Node, ...]]] = []
    pending: list[tuple[Node, tuple[Node, ...]]] = [(source, ())]
    while pending:
        form, views = pending.pop()
        for user in form.users:
            dtype = cast_dtype(user)
            if dtype is not None:
                if dtype.is_floating_point and dtype.itemsize < itemsize:
                    found.append((user, views))
            elif is_view_or_cast(user) and user.target is not operator.getitem and user.all_input_nodes == [form]:
                pending.append((user, (*views, user)))
    return found


def repeat_views(graph: Graph, source: Node, views: Sequence[Node]) -> Node:
    """Insert the same views of ``source``, which may have another dtype, and return the last one."""
    for view in views:
        made = graph.call_function(view.target, (source, *view.args[1:]), view.kwargs)  # type: ignore[arg-type]
        made.meta.update(view.meta)
        made.meta["val"] = view.target(source.meta["val"], *view.args[1:], **view.kwargs)  # type: ignore[operator]
        source = made
    return source


class NodeReplacer:
    """Replace nodes of a graph, and change its output only once.

    torch records all inputs of a node anew at each change, and the output reads one value per weight. Call
    :meth:`replace` and :meth:`erase` as often as needed, then :meth:`done`.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._output = output_node(graph)
        self._returned: dict[Node, Node] = {}
        self._gone: list[Node] = []

    def replace(self, node: Node, successor: Node) -> None:
        """Make users of ``node`` read ``successor``, the output after :meth:`done`. Erase the node then."""
        if self._output in node.users:
            self._returned[node] = successor
        node.replace_all_uses_with(successor, delete_user_cb=lambda user: user is not self._output)
        self.erase(node)

    def erase(self, node: Node) -> None:
        """Erase a node after all; only nodes that are replaced or erased earlier may read it."""
        self._gone.append(node)

    def done(self) -> None:
        """Change the output and erase the nodes."""
        if self._returned:
            self._output.args = map_arg(self._output.args, lambda node: self._returned.get(node, node))
        for node in self._gone:
            self._graph.erase_node(node)


class RandomOpFound(Exception):
    """A random number would have been drawn."""


class ForbidRandomOps(TorchDispatchMode):
    """A mode in which ops that draw random numbers raise :class:`RandomOpFound`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise RandomOpFound(func)
        return func(*args, **(kwargs or {}))


def draws_random(node: Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def format_graph(graph: Graph) -> str:
    """Return a line per node: number, name, op, arguments, and the dtype and shape of its result.

    Nodes are numbered as in plans, without inputs, output and the plan's own node.
    """
    lines, number = [], 0
    for node, (_, line) in zip(graph.nodes, format_nodes(graph), strict=True):
        shown = str(number) if is_numbered(node) else ""
        number += is_numbered(node)
        lines.append(f"{shown:>5}  {line}\n")
    return "".join(lines)


def format_nodes(graph: Graph) -> Iterator[tuple[str, str]]:
    """Yield each node's name and line without a number, which does not change unless the node does."""
    for node in graph.nodes:
        shape = _shape(node.meta.get("val"))
        yield node.name, f"{_call(node)}{f'  # {shape}' if shape else ''}"


def is_numbered(node: Node) -> bool:
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
    # The plan's own node has the whole plan as an argument.
    return f"{value[:most]!r}..." if isinstance(value, str) and len(value) > most else str(value)


def _shape(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, tuple | list):
        return ", ".join(map(_shape, value))
    return "" if value is None else str(value)
