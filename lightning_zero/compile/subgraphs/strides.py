"""Strides as they will be. Inductor's own passes over a graph, such as the one that makes a matrix product faster by
padding it, change layouts and leave what is noted of the nodes behind them as it was. A graph that is compiled whole
does not mind; pieces are compiled by what is noted, and would be handed tensors of other strides."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from lightning_zero.compat.ops import OpOverload
from lightning_zero.compile.subgraphs.signatures import NodeSignatures, signature
from lightning_zero.native.ops import find_op
from lightning_zero.profiling.graph_tensors import is_view, nodes_where, tensors_of

__all__ = ["StrideMismatch", "check_strides", "fix_strides"]

_aten = torch.ops.aten


def fix_strides(graph: Graph, inputs: Sequence[Any]) -> None:
    """Notes the strides that views, and what is made from them, really have.

    Args:
        graph: whose nodes' ``meta["val"]`` are mended in place. A view that cannot be one any more becomes a reshape.
        inputs: of the graph, as fake tensors, numbers and symbols, with their strides.
    """
    changed: set[Node] = set()
    right: set[Hashable] = set()  # views as they are noted; equal layers have equal ones
    seen, views = NodeSignatures(), nodes_where(graph.nodes, is_view)
    for node, value in zip(graph.find_nodes(op="placeholder"), inputs, strict=True):
        _note(node, value, changed)
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is operator.getitem or (changed and not changed.isdisjoint(node.all_input_nodes)):
            if _is_known(node):
                _note(node, _run(node), changed)
        elif node in views and (before := seen[node]) not in right and _is_known(node):
            _note(node, _run(node), changed)
            if signature(node) == before:
                right.add(before)


def check_strides(compiled: Any, outputs: Sequence[Any]) -> None:
    """Raises :class:`StrideMismatch` where the results of a compiled piece are not as was noted.

    Args:
        compiled: what Inductor made.
        outputs: of the piece, as noted.
    """
    made = getattr(compiled, "output_strides", None) or [None] * len(outputs)
    for strides, value in zip(made, outputs, strict=True):
        if strides is None or not isinstance(value, Tensor) or 0 in value.shape:
            continue
        noted = [str(stride) for size, stride in zip(value.shape, value.stride(), strict=True) if str(size) != "1"]
        found = [str(stride) for size, stride in zip(value.shape, strides, strict=True) if str(size) != "1"]
        # Symbols may be written in other ways.
        known = [pair for pair in zip(noted, found, strict=True) if all(stride.isdecimal() for stride in pair)]
        if any(one != other for one, other in known):
            raise StrideMismatch(f"strides of a result are {found}, and others were told {noted}")


class StrideMismatch(Exception):
    """Inductor has chosen a layout for a piece's result that nobody expects."""


def _is_known(node: Node) -> bool:
    """Whether running it with fake tensors tells its strides, and does nothing else."""
    target = node.target
    if any("val" not in part.meta for part in (node, *node.all_input_nodes)):
        return False
    if target is operator.getitem:
        return True
    if not isinstance(target, OpOverload) or (target.namespace not in ("aten", "prims") and not _is_copy(target)):
        return False
    return "unbacked_bindings" not in node.meta and not node.is_impure()


def _is_copy(target: OpOverload) -> bool:
    """Whether it is an op of ours that copies a tensor as it lies in memory."""
    op = find_op(target)
    return op is not None and op.name in ("offload", "offload_start", "reload", "reload_start")


def _run(node: Node) -> Any:
    target: Any = node.target
    args: Any
    kwargs: Any
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda read: read.meta["val"])
    if target is operator.getitem and not isinstance(args[0], Tensor):
        return target(*args)
    with torch.no_grad():
        try:
            return target(*args, **kwargs)
        except (RuntimeError, ValueError):
            if target is not _aten.view.default:
                raise
            node.target = _aten.reshape.default
            return _aten.reshape.default(*args, **kwargs)


def _note(node: Node, value: Any, changed: set[Node]) -> None:
    if _strides(node.meta.get("val")) != _strides(value):
        node.meta["val"] = value
        changed.add(node)


def _strides(value: Any) -> str:
    # By text: comparing symbols would add guards.
    return str(value.stride() if isinstance(value, Tensor) else [tensor.stride() for tensor in tensors_of(value)])
