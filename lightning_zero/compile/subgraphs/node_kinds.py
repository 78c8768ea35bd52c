"""What the nodes of a graph are where it is cut into pieces.

Work is what pieces are compiled from, and has a place in one of them. Views and constants cost nothing: each piece
makes those that it reads. What is ours (gathers, waits, gradients that are handed over) and what differs between equal
layers though it costs nothing (where in a group a weight begins, the seeds of random numbers, sizes) runs between
pieces.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from enum import Enum, auto
from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt, Tensor
from torch.fx import Graph, Node
from torch.utils.flop_counter import flop_registry

from lightning_zero.compat.ops import OpOverload, inductor_seeds, wait_tensor
from lightning_zero.compile.graph import is_start
from lightning_zero.native.ops import op_of
from lightning_zero.profiling.graph_tensors import aliased_argument, called_op, is_view, is_view_op, tensors_of

__all__ = ["Kind", "all_read", "is_kernel", "is_pointwise", "is_random", "kinds_of", "readers", "reads"]

_aten = torch.ops.aten
_CUTS_OUT = {_aten.slice.Tensor, _aten.view.default}  # a weight out of a group


_SCALARS = (int, float, bool, SymInt, SymFloat, SymBool)


class Kind(Enum):
    """Of a node."""

    INPUT = auto()
    WORK = auto()
    FREE = auto()  # a view, or a constant
    BETWEEN = auto()
    OUTPUT = auto()


class _Usual(Enum):
    """What calls an op, as a rule: where it is given a node first, and makes a tensor."""

    WORK = auto()  # where it is given a tensor
    OURS = auto()  # in any case
    VIEW = auto()
    CUT = auto()  # out of a group, or a view
    PART = auto()  # of what it is given


def kinds_of(graph: Graph) -> dict[Node, Kind]:
    """Of all nodes."""
    kinds: dict[Node, Kind] = {}
    usual: dict[int, _Usual | None] = {}  # by ids of what is called: few, where there are many nodes
    for node in graph.nodes:
        if node.op == "call_function":
            key = id(node.target)
            if key not in usual:
                usual[key] = _usual(node.target)
            found = _by_rule(node, usual[key], kinds)
            kinds[node] = _kind(node, kinds) if found is None else found
        else:
            kinds[node] = _kind(node, kinds)
    return kinds


def _usual(target: Any) -> _Usual | None:
    if op_of(target) is not None or target in inductor_seeds:
        return _Usual.OURS
    if target is operator.getitem:
        return _Usual.PART
    if target is wait_tensor or not isinstance(target, OpOverload):
        return None
    if not is_view_op(target):
        return _Usual.WORK
    return (_Usual.CUT if target in _CUTS_OUT else _Usual.VIEW) if aliased_argument(target) == 0 else None


def _by_rule(node: Node, usual: _Usual | None, kinds: dict[Node, Kind]) -> Kind | None:
    """What :func:`_kind` finds, where little has to be asked for that."""
    if usual is _Usual.OURS:
        return Kind.BETWEEN
    args = node.args
    first = args[0] if args else None
    if usual is None or type(first) is not Node or not ("val" in node.meta and isinstance(node.meta["val"], Tensor)):
        return None
    if usual is _Usual.WORK:
        return Kind.WORK if "val" in first.meta and isinstance(first.meta["val"], Tensor) else None
    if usual is _Usual.PART or (usual is _Usual.CUT and kinds[first] is Kind.BETWEEN):
        return kinds[first]
    return Kind.FREE


def _kind(node: Node, kinds: dict[Node, Kind]) -> Kind:
    value = node.meta.get("val")
    if node.op == "placeholder":
        return Kind.INPUT
    if node.op == "get_attr":  # a constant; or the body of a higher-order op, which goes where it is called
        return Kind.INPUT if isinstance(value, Tensor) else Kind.FREE
    if node.op == "output":
        return Kind.OUTPUT
    reads = node.all_input_nodes
    if op_of(node.target) is not None or node.target in inductor_seeds:
        return Kind.BETWEEN
    if node.target is wait_tensor and is_start(reads[0]):
        return Kind.BETWEEN
    if node.target in _CUTS_OUT and kinds[reads[0]] is Kind.BETWEEN:
        return Kind.BETWEEN
    if isinstance(value, _SCALARS) and not any(kinds[read] in (Kind.WORK, Kind.FREE) for read in reads):
        return Kind.BETWEEN
    if node.target is operator.getitem:
        return kinds[reads[0]]  # with what it is a part of
    if is_view(node) and node.target is not wait_tensor:
        return Kind.FREE
    constant = isinstance(value, Tensor) and not any(tensors_of(read.meta.get("val")) for read in reads)
    return Kind.FREE if constant and not node.is_impure() and not is_random(node) else Kind.WORK


def all_read(node: Node, kinds: dict[Node, Kind]) -> Iterator[Node]:
    """What a node reads, through views."""
    for read in node.all_input_nodes:
        if kinds[read] is Kind.FREE:
            yield from all_read(read, kinds)
        else:
            yield read


def reads(graph: Graph, kinds: dict[Node, Kind]) -> dict[Node, list[Node]]:
    """By node: what :func:`all_read` gives."""
    found: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        through: list[Node] = []
        for read in node.all_input_nodes:
            through += found[read] if kinds[read] is Kind.FREE else (read,)
        found[node] = through
    return found


def readers(graph: Graph, kinds: dict[Node, Kind]) -> dict[Node, list[Node]]:
    """By node: those of it and of its views."""
    found: dict[Node, list[Node]] = {}
    for node in reversed(graph.nodes):
        through: list[Node] = []
        for user in node.users:
            through += found[user] if kinds[user] is Kind.FREE else (user,)
        found[node] = through
    return found


def is_kernel(node: Node) -> bool:
    """Whether a node is a kernel of its own, whose inputs and results lie in memory: matrix products, attention. What
    is not known to be one may be made together with what comes before or behind it."""
    if node.target is operator.getitem:
        read = node.args[0]
        return isinstance(read, Node) and is_kernel(read)
    op, _ = called_op(node)
    return isinstance(op, OpOverload) and op.overloadpacket in flop_registry


def is_pointwise(node: Node) -> bool:
    """Whether each element of a node's result is made from the same elements of its inputs."""
    return isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags


def is_random(node: Node) -> bool:
    """Whether a node draws random numbers."""
    op, _ = called_op(node)
    return isinstance(op, OpOverload) and torch.Tag.nondeterministic_seeded in op.tags
