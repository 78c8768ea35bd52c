"""Replace writes of one value through a bool mask, ``x[mask] = value``, by ``torch.where``.

The derivative of such a write has as many rows as the mask has true elements. AOTAutograd cannot trace that size, and
torch then runs the whole graph eagerly. Speech and image models write a learned vector at masked positions this way.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from lightning_zero.compat.graphs import EXAMPLE_VALUE


def replace_masked_writes(module: GraphModule) -> int:
    """Replace writes in place, also inside checkpointed regions, and return their number.

    Writes of a row for each true element of the mask stay as they are.
    """
    replaced = 0
    for part in module.modules():
        if not isinstance(part, GraphModule):
            continue
        before = replaced
        for node in part.graph.find_nodes(op="call_function", target=operator.setitem):
            replaced += _replace(part, node)
        if replaced > before:
            part.recompile()
    return replaced


def _replace(module: GraphModule, write: Node) -> bool:
    """Replace a write if all its rows are one value, and return True if it was."""
    if write.users or len(write.args) != 3:
        return False
    target, index, source = write.args
    mask = _mask(index)
    x, chosen, value = (_value(node) for node in (target, mask, source))
    if x is None or chosen is None or value is None or chosen.dtype != torch.bool or value.dtype != x.dtype:
        return False
    rest = x.dim() - chosen.dim()
    if rest < 0 or x.shape[: chosen.dim()] != chosen.shape or value.device != x.device:
        return False
    rows = value.dim() > rest
    if value.dim() > rest + 1 or (rows and not (isinstance(value.shape[0], int) and value.shape[0] == 1)):
        return False
    with module.graph.inserting_before(write):
        if rows:
            source = _call(module, operator.getitem, source, 0)
        if rest:
            mask = _call(module, operator.getitem, mask, (..., *[None] * rest))
        written = _call(module, torch.where, mask, source, target)
        copy = module.graph.call_method("copy_", (target, written))
    assert isinstance(target, Node)
    copy.meta = dict(target.meta)
    module.graph.erase_node(write)
    return True


def _mask(index: Any) -> Any:
    """Return the mask of an index: a mask alone, or followed by whole dimensions."""
    if isinstance(index, list | tuple) and index and all(i is ... or i == slice(None) for i in index[1:]):
        return index[0]
    return index


def _value(node: Any) -> Tensor | None:
    value = node.meta.get(EXAMPLE_VALUE) if isinstance(node, Node) else None
    return value if isinstance(value, Tensor) else None


def _call(module: GraphModule, function: Any, *args: Any) -> Node:
    node = module.graph.call_function(function, args)
    values = [arg.meta[EXAMPLE_VALUE] if isinstance(arg, Node) else arg for arg in args]
    with torch.no_grad():
        node.meta[EXAMPLE_VALUE] = function(*values)
    return node
