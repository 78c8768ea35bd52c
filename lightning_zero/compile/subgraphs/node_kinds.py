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
from lightning_zero.compile.fx_utils import is_start
from lightning_zero.native.ops import find_op
from lightning_zero.profiling.tensors import aliased_argument, called_op, is_view, is_view_op, tensors_of

__all__ = ["NodeKind", "all_read", "is_kernel", "is_pointwise", "is_random", "classify_nodes", "readers", "reads"]

_aten = torch.ops.aten
_CUTS_OUT = {_aten.slice.Tensor, _aten.view.default}  # a weight out of a group


_SCALARS = (int, float, bool, SymInt, SymFloat, SymBool)


class NodeKind(Enum):
    """Of a node."""

    INPUT = auto()
    COMPUTE = auto()
    VIEW = auto()  # a view, or a constant
    COMM = auto()
    OUTPUT = auto()


class _TargetKind(Enum):
    """What calls an op, as a rule: where it is given a node first, and makes a tensor."""

    COMPUTE = auto()  # where it is given a tensor
    OURS = auto()  # in any case
    VIEW = auto()
    CUT = auto()  # out of a group, or a view
    PART = auto()  # of what it is given


def classify_nodes(graph: Graph) -> dict[Node, NodeKind]:
    """Of all nodes."""
    kinds: dict[Node, NodeKind] = {}
    usual: dict[int, _TargetKind | None] = {}  # by ids of what is called: few, where there are many nodes
    for node in graph.nodes:
        if node.op == "call_function":
            key = id(node.target)
            if key not in usual:
                usual[key] = _target_kind(node.target)
            found = _by_rule(node, usual[key], kinds)
            kinds[node] = _kind(node, kinds) if found is None else found
        else:
            kinds[node] = _kind(node, kinds)
    return kinds


def _target_kind(target: Any) -> _TargetKind | None:
    if find_op(target) is not None or target in inductor_seeds:
        return _TargetKind.OURS
    if target is operator.getitem:
        return _TargetKind.PART
    if target is wait_tensor or not isinstance(target, OpOverload):
        return None
    if not is_view_op(target):
        return _TargetKind.COMPUTE
    return (_TargetKind.CUT if target in _CUTS_OUT else _TargetKind.VIEW) if aliased_argument(target) == 0 else None


def _by_rule(node: Node, usual: _TargetKind | None, kinds: dict[Node, NodeKind]) -> NodeKind | None:
    """What :func:`_kind` finds, where little has to be asked for that."""
    if usual is _TargetKind.OURS:
        return NodeKind.COMM
    args = node.args
    first = args[0] if args else None
    if usual is None or type(first) is not Node or not ("val" in node.meta and isinstance(node.meta["val"], Tensor)):
        return None
    if usual is _TargetKind.COMPUTE:
        return NodeKind.COMPUTE if "val" in first.meta and isinstance(first.meta["val"], Tensor) else None
    if usual is _TargetKind.PART or (usual is _TargetKind.CUT and kinds[first] is NodeKind.COMM):
        return kinds[first]
    return NodeKind.VIEW


def _kind(node: Node, kinds: dict[Node, NodeKind]) -> NodeKind:
    value = node.meta.get("val")
    if node.op == "placeholder":
        return NodeKind.INPUT
    if node.op == "get_attr":  # a constant; or the body of a higher-order op, which goes where it is called
        return NodeKind.INPUT if isinstance(value, Tensor) else NodeKind.VIEW
    if node.op == "output":
        return NodeKind.OUTPUT
    reads = node.all_input_nodes
    if find_op(node.target) is not None or node.target in inductor_seeds:
        return NodeKind.COMM
    if node.target is wait_tensor and is_start(reads[0]):
        return NodeKind.COMM
    if node.target in _CUTS_OUT and kinds[reads[0]] is NodeKind.COMM:
        return NodeKind.COMM
    if isinstance(value, _SCALARS) and not any(kinds[read] in (NodeKind.COMPUTE, NodeKind.VIEW) for read in reads):
        return NodeKind.COMM
    if node.target is operator.getitem:
        return kinds[reads[0]]  # with what it is a part of
    if is_view(node) and node.target is not wait_tensor:
        return NodeKind.VIEW
    constant = isinstance(value, Tensor) and not any(tensors_of(read.meta.get("val")) for read in reads)
    return NodeKind.VIEW if constant and not node.is_impure() and not is_random(node) else NodeKind.COMPUTE


def all_read(node: Node, kinds: dict[Node, NodeKind]) -> Iterator[Node]:
    """What a node reads, through views."""
    for read in node.all_input_nodes:
        if kinds[read] is NodeKind.VIEW:
            yield from all_read(read, kinds)
        else:
            yield read


def reads(graph: Graph, kinds: dict[Node, NodeKind]) -> dict[Node, list[Node]]:
    """By node: what :func:`all_read` gives."""
    found: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        through: list[Node] = []
        for read in node.all_input_nodes:
            through += found[read] if kinds[read] is NodeKind.VIEW else (read,)
        found[node] = through
    return found


def readers(graph: Graph, kinds: dict[Node, NodeKind]) -> dict[Node, list[Node]]:
    """By node: those of it and of its views."""
    found: dict[Node, list[Node]] = {}
    for node in reversed(graph.nodes):
        through: list[Node] = []
        for user in node.users:
            through += found[user] if kinds[user] is NodeKind.VIEW else (user,)
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
