"""What backward needs of a graph's input that forward edits (a queue of keys, a running mean) is that input as it was.

Torch's partitioner takes inputs for free: it saves them, and computes again in backward what was made of them. The edit
stands at the end of forward, in the same memory, so backward computed with what came after it, and gradients were wrong
without a word; under plain ``torch.compile`` they are.
"""

from __future__ import annotations

import operator

import torch
from torch import Tensor
from torch.fx import Graph, Node

from lightning_zero.compile.graph import cast_dtype, first_call, is_view_or_cast, results

__all__ = ["save_mutated_buffers"]

_COPY = torch.ops.aten.copy_.default


def save_mutated_buffers(forward: Graph, outputs: int) -> int:
    """Saves a copy in place of each edited input, in place; returns how many there are.

    Args:
        forward: after partitioning.
        outputs: of its results, so many are not saved for backward.
    """
    saved = [node for node in results(forward)[outputs:] if isinstance(node, Node)]
    read = {source for node in saved if (source := _source(node)).op == "placeholder"}
    edited = [node for node in forward.find_nodes(op="placeholder") if node in read and any(_edits(node))]
    for node in edited:
        with forward.inserting_before(first_call(forward)):
            copy = _copied(forward, node)
        _read_instead(forward, node, copy, outputs)
    return len(edited)


def _edits(node: Node) -> list[Node]:
    return [user for user in node.users if user.target is _COPY and user.args[0] is node]


def _source(node: Node) -> Node:
    """In whose memory it lies, or the copy of which it is."""
    while node.target is operator.getitem or (is_view_or_cast(node) and cast_dtype(node) is None):
        [node, *_] = node.all_input_nodes
    return node


def _copied(graph: Graph, node: Node) -> Node:
    value: Tensor = node.meta["val"]
    packed = value.clone()
    if packed.stride() == value.stride():
        copy = graph.call_function(torch.ops.aten.clone.default, (node,))
        copy.meta["val"] = packed
        return copy
    # Its memory has gaps, and backward was traced for such an input.
    empty = graph.call_function(torch.ops.aten.new_empty_strided.default, (node, value.size(), value.stride()))
    empty.meta["val"] = value.new_empty_strided(value.size(), value.stride())
    filled = graph.call_function(torch.ops.aten.copy.default, (empty, node))
    filled.meta["val"] = empty.meta["val"]
    return filled


def _read_instead(graph: Graph, node: Node, copy: Node, outputs: int) -> None:
    """Everywhere but in edits, and in what is returned to whoever calls the graph."""
    keep = {copy, *_edits(node), *copy.all_input_nodes}
    returned = results(graph)
    for user in list(node.users):
        if user.op == "output":
            rest = [copy if value is node else value for value in returned[outputs:]]
            user.args = ((*returned[:outputs], *rest),)
        elif user not in keep:
            user.replace_input_with(node, copy)
