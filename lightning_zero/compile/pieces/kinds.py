"""What the nodes of a graph are where it is cut into pieces.

Work is what pieces are compiled from, and has a place in one of them. Views and constants cost nothing: each piece
makes those that it reads. What is ours (gathers, waits, gradients that are handed over) and what differs between equal
layers though it costs nothing (where in a group a weight begins, the seeds of random numbers, sizes) runs between
pieces.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from enum import Enum, auto
from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt, Tensor
from torch.fx import Graph, Node
from torch.utils.flop_counter import flop_registry

from lightning_zero.compat.ops import OpOverload, inductor_seeds, wait_tensor
from lightning_zero.compile.graph import is_start
from lightning_zero.native.ops import op_of
from lightning_zero.profiling.tensors import called, is_view, tensors_of, views

__all__ = ["Kind", "all_read", "is_kernel", "is_pointwise", "is_random", "kinds_of", "readers", "reads", "those"]

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


def kinds_of(graph: Graph) -> dict[Node, Kind]:
    """Of all nodes."""
    kinds: dict[Node, Kind] = {}
    tied: dict[int, bool] = {}  # by ids of targets, of which a graph has few: whether more than the nodes' values count
    for node in graph.nodes:
        if node.op == "call_function":
            target = node.target
            if id(target) not in tied:
                tied[id(target)] = _is_tied(target)
            if not tied[id(target)] and _makes_tensors_of_tensors(node):
                kinds[node] = Kind.WORK
                continue
        kinds[node] = _kind(node, kinds)
    return kinds


def _is_tied(target: Any) -> bool:
    """Whether it is not only by its values that what calls it may be anything else than work."""
    if op_of(target) is not None or target in inductor_seeds or target is wait_tensor or target in _CUTS_OUT:
        return True
    return not isinstance(target, OpOverload) or views(target)


def _makes_tensors_of_tensors(node: Node) -> bool:
    """Of most work, its value and its first argument show it."""
    args, meta = node.args, node.meta
    first = args[0] if args else None
    if type(first) is not Node or not isinstance(meta.get("val"), Tensor):
        return False
    return isinstance(first.meta.get("val"), Tensor)


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
        inputs = node.all_input_nodes
        found[node] = _through(inputs, kinds, found)
    return found


def readers(graph: Graph, kinds: dict[Node, Kind]) -> dict[Node, list[Node]]:
    """By node: those of it and of its views."""
    found: dict[Node, list[Node]] = {}
    for node in reversed(graph.nodes):
        found[node] = _through(node.users, kinds, found)
    return found


def _through(nodes: Iterable[Node], kinds: dict[Node, Kind], found: dict[Node, list[Node]]) -> list[Node]:
    through: list[Node] = []
    for node in nodes:
        through += found[node] if kinds[node] is Kind.FREE else (node,)
    return through


def those(nodes: Iterable[Node], ask: Callable[[Node], bool]) -> set[Node]:
    """Of which it is so, where that is so of all that call the same op of torch, which is asked once."""
    known: dict[int, bool] = {}
    found: set[Node] = set()
    for node in nodes:
        if node.op != "call_function":
            continue
        target: Any = node.target
        if id(target) in known:
            yes = known[id(target)]
        else:
            yes = ask(node)
            if isinstance(target, OpOverload):
                known[id(target)] = yes
        if yes:
            found.add(node)
    return found


def is_kernel(node: Node) -> bool:
    """Whether a node is a kernel of its own, whose inputs and results lie in memory: matrix products, attention. What
    is not known to be one may be made together with what comes before or behind it."""
    if node.target is operator.getitem:
        read = node.args[0]
        return isinstance(read, Node) and is_kernel(read)
    op, _ = called(node)
    return isinstance(op, OpOverload) and op.overloadpacket in flop_registry


def is_pointwise(node: Node) -> bool:
    """Whether each element of a node's result is made from the same elements of its inputs."""
    return isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags


def is_random(node: Node) -> bool:
    """Whether a node draws random numbers."""
    op, _ = called(node)
    return isinstance(op, OpOverload) and torch.Tag.nondeterministic_seeded in op.tags
