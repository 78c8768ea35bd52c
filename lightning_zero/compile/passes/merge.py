"""One gather, and one gradient, for uses of a tied weight that lie close together.

A weight that is used again soon is not gathered again: the copy that is there is used. One that is used again much
later (an embedding tied to the head) is: keeping it would cost its memory in between.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from lightning_zero.compile.graph import gathers, reduces, shard_of
from lightning_zero.compile.passes.grouping import size_of

__all__ = ["merge_reduces", "share_gathers"]


def share_gathers(graph: Graph, within_bytes: int, small_bytes: int) -> Graph:
    """Replaces a gather by an earlier one of the same weight in the same dtype, in place.

    Args:
        within_bytes: when at most so many bytes of other weights are gathered in between.
        small_bytes: weights of at most this size are shared however far apart; they are kept anyway.
    """
    latest: dict[tuple[object, ...], tuple[Node, int]] = {}
    travelled = 0
    for node in gathers(graph):
        size = size_of(node)
        key = (shard_of(node), node.args[2])
        earlier, at = latest.get(key, (None, 0))
        if earlier is not None and (size <= small_bytes or travelled - at <= within_bytes):
            node.replace_all_uses_with(earlier)
            graph.erase_node(node)
            node = earlier
        else:
            travelled += size
        latest[key] = (node, travelled)
    return graph


def merge_reduces(graph: Graph) -> Graph:
    """``reduce(a, s); reduce(b, s)`` becomes ``reduce(a + b, s)``, in place, when nothing else is reduced in between.

    Only gradients of one dtype: a sum in the wider one would make a copy.
    """
    position = {node: number for number, node in enumerate(graph.nodes)}
    previous: Node | None = None
    for node in reduces(graph):
        if previous is not None and _mergeable(previous, node, position):
            grad, other = node.args[0], previous.args[0]
            assert isinstance(grad, Node)
            assert isinstance(other, Node)
            with graph.inserting_before(node):
                total = graph.call_function(torch.ops.aten.add.Tensor, (other, grad))
            total.meta["val"] = torch.empty_like(grad.meta["val"])
            node.args = (total, *node.args[1:])
            previous.replace_all_uses_with(node)
            graph.erase_node(previous)
        previous = node
    return graph


def _mergeable(first: Node, second: Node, position: dict[Node, int]) -> bool:
    same = shard_of(first) is shard_of(second) and _dtype(first) == _dtype(second)
    return same and all(position[user] > position[second] for user in first.users)


def _dtype(node: Node) -> torch.dtype:
    grad = node.args[0]
    assert isinstance(grad, Node)
    return grad.meta["val"].dtype
