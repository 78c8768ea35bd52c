"""Classify the nodes of a graph that is cut into subgraphs.

Compute nodes belong to one subgraph. Views and constants cost nothing, so each subgraph has its own copies. Our own ops
(gathers, waits, gradient reductions) run between subgraphs. So do nodes that differ between equal layers but cost
nothing: offsets of weights in a group, seeds of random numbers, and sizes.
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

from lightning_zero.compat.tensors import OpOverload, wait_tensor
from lightning_zero.compile.fx_utils import is_start
from lightning_zero.native.ops import Role, find_op
from lightning_zero.profiling.graph_tensors import aliased_argument, called_op, is_view, is_view_op, tensors_of

_aten = torch.ops.aten
_CUTS_OUT = {_aten.slice.Tensor, _aten.view.default}  # these may cut a weight out of its group


_SCALARS = (int, float, bool, SymInt, SymFloat, SymBool)

# Inductor's op that draws the seeds of a graph's random numbers.
SEEDS = "prims::inductor_seeds"
# Indices of seeds differ between equal layers.
_SEED_OPS = {SEEDS, "prims::inductor_seed", "prims::inductor_lookup_seed"}


class NodeKind(Enum):
    INPUT = auto()
    COMPUTE = auto()
    VIEW = auto()  # a view or a constant
    COMM = auto()
    OUTPUT = auto()


class _TargetKind(Enum):
    """Kind that calls of an op usually have, if the first argument is a node and the result a tensor."""

    COMPUTE = auto()  # if the first argument is a tensor
    OURS = auto()  # always
    VIEW = auto()
    CUT = auto()  # cuts a weight out of a group, or is a view
    PART = auto()  # part of its argument


def classify_nodes(graph: Graph) -> dict[Node, NodeKind]:
    kinds: dict[Node, NodeKind] = {}
    usual: dict[int, _TargetKind | None] = {}  # by id of the target: graphs have many nodes and few targets
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


def op_name(target: Any) -> str:
    """Return the name of an op with its namespace; empty for other functions."""
    return target.name() if isinstance(target, OpOverload) else ""


def _runs_between(target: Any) -> bool:
    op = find_op(target)
    return op_name(target) in _SEED_OPS if op is None else op.role is not Role.KERNEL


def _target_kind(target: Any) -> _TargetKind | None:
    if _runs_between(target):
        return _TargetKind.OURS
    if target is operator.getitem:
        return _TargetKind.PART
    if target is wait_tensor or not isinstance(target, OpOverload):
        return None
    if not is_view_op(target):
        return _TargetKind.COMPUTE
    return (_TargetKind.CUT if target in _CUTS_OUT else _TargetKind.VIEW) if aliased_argument(target) == 0 else None


def _by_rule(node: Node, usual: _TargetKind | None, kinds: dict[Node, NodeKind]) -> NodeKind | None:
    """Return the result of :func:`_kind` for the common cases, which need few checks."""
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
    if node.op == "get_attr":  # a constant, or the body of a higher-order op, which moves with its call
        return NodeKind.INPUT if isinstance(value, Tensor) else NodeKind.VIEW
    if node.op == "output":
        return NodeKind.OUTPUT
    reads = node.all_input_nodes
    if _runs_between(node.target):
        return NodeKind.COMM
    if node.target is wait_tensor and is_start(reads[0]):
        return NodeKind.COMM
    if node.target in _CUTS_OUT and kinds[reads[0]] is NodeKind.COMM:
        return NodeKind.COMM
    if isinstance(value, _SCALARS) and not any(kinds[read] in (NodeKind.COMPUTE, NodeKind.VIEW) for read in reads):
        return NodeKind.COMM
    if node.target is operator.getitem:
        return kinds[reads[0]]  # the kind of the value that it indexes
    if is_view(node) and node.target is not wait_tensor:
        return NodeKind.VIEW
    constant = isinstance(value, Tensor) and not any(tensors_of(read.meta.get("val")) for read in reads)
    return NodeKind.VIEW if constant and not node.is_impure() and not is_random(node) else NodeKind.COMPUTE


def all_read(node: Node, kinds: dict[Node, NodeKind]) -> Iterator[Node]:
    """Yield the nodes that a node reads, through views."""
    for read in node.all_input_nodes:
        if kinds[read] is NodeKind.VIEW:
            yield from all_read(read, kinds)
        else:
            yield read


def reads(graph: Graph, kinds: dict[Node, NodeKind]) -> dict[Node, list[Node]]:
    """Return the nodes that each node reads, through views."""
    found: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        through: list[Node] = []
        for read in node.all_input_nodes:
            through += found[read] if kinds[read] is NodeKind.VIEW else (read,)
        found[node] = through
    return found


def readers(graph: Graph, kinds: dict[Node, NodeKind]) -> dict[Node, list[Node]]:
    """Return the readers of each node, through views."""
    found: dict[Node, list[Node]] = {}
    for node in reversed(graph.nodes):
        through: list[Node] = []
        for user in node.users:
            through += found[user] if kinds[user] is NodeKind.VIEW else (user,)
        found[node] = through
    return found


def is_kernel(node: Node) -> bool:
    """Return True if the node is a kernel of its own (matrix product, attention).

    Its inputs and results are in memory.

    Inductor may fuse other nodes with their neighbors.
    """
    if node.target is operator.getitem:
        read = node.args[0]
        return isinstance(read, Node) and is_kernel(read)
    op, _ = called_op(node)
    return isinstance(op, OpOverload) and op.overloadpacket in flop_registry


def is_pointwise(node: Node) -> bool:
    """Return True if each element depends only on the same elements of the inputs."""
    return isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags


def is_random(node: Node) -> bool:
    op, _ = called_op(node)
    return isinstance(op, OpOverload) and torch.Tag.nondeterministic_seeded in op.tags
