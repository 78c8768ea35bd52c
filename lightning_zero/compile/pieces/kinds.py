"""What the nodes of a graph are where it is cut into pieces.

Work is what pieces are compiled from, and has a place in one of them. Views and constants cost nothing: each piece
makes those that it reads. What is ours (gathers, waits, gradients that are handed over) and what differs between equal
layers though it costs nothing (where in a group a weight begins, the seeds of random numbers, sizes) runs between
pieces.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator
from enum import Enum, auto
from typing import Any

import torch
from torch import Generator, SymBool, SymFloat, SymInt, Tensor
from torch.fx import Graph, Node
from torch.utils.flop_counter import flop_registry

from lightning_zero.compat.ops import OpOverload, inductor_seeds, wait_tensor
from lightning_zero.compile.graph import is_start
from lightning_zero.native.ops import op_of
from lightning_zero.profiling.tensors import called, is_view, tensors_of

__all__ = ["Asked", "Kind", "all_read", "is_kernel", "is_pointwise", "is_random", "kinds_of", "shape", "signature"]

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
    for node in graph.nodes:
        kinds[node] = _kind(node, kinds)
    return kinds


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


def signature(node: Node, shapes: Asked | None = None) -> Hashable:
    """Equal for nodes that do the same with inputs of the same sizes, wherever these come from.

    Args:
        shapes: of those that have been asked for, of several nodes.
    """
    known = shapes if shapes is not None else Asked(shape)
    constants = torch.fx.map_arg((node.args, node.kwargs), known.__getitem__)
    return str(node.target), str(constants), known[node]


class Asked(dict[Node, Any]):
    """What a function says of nodes, of each of which it is asked once."""

    def __init__(self, ask: Callable[[Node], Any]) -> None:
        super().__init__()
        self._ask = ask

    def __missing__(self, node: Node) -> Any:
        found = self[node] = self._ask(node)
        return found


def shape(node: Node) -> str:
    """What of a node's value code is generated for."""
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.device}"
    if isinstance(value, Generator):  # each op has one of its own; its words say where in memory it lies
        return f"generator on {value.device}"
    return str(value) if not isinstance(value, list | tuple) else str(len(value))


def is_random(node: Node) -> bool:
    """Whether a node draws random numbers."""
    op, _ = called(node)
    return isinstance(op, OpOverload) and torch.Tag.nondeterministic_seeded in op.tags
