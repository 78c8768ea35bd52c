"""Groups gathers that are used one after the other, and starts each group while the one before it is in use.

One launch for a group costs what one launch for a weight costs, and a large transfer reaches the bandwidth that small
ones do not. The weights of a group arrive in one tensor and are views of it: nothing is copied. At most two groups are
in flight or in use, next to the small weights, which are gathered at the beginning and kept.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from lightning_zero.compile.graph import gathers, ops

__all__ = ["group_gathers"]

_wait = torch.ops._c10d_functional.wait_tensor.default
_slice = torch.ops.aten.slice.Tensor
_view = torch.ops.aten.view.default


def group_gathers(graph: Graph, world_size: int, group_bytes: int, small_bytes: int, parts: int, ahead: int) -> Graph:
    """Replaces gathers by groups, in place.

    Args:
        world_size: number of shards that make a weight.
        group_bytes: at most so many bytes in a group; a larger weight is a group of its own.
        small_bytes: weights up to this size are gathered together at the beginning of the graph.
        parts: smaller groups where the graph gathers little: about this many for the whole graph.
        ahead: a group is started when the one that comes ``ahead`` before it is first waited for.
    """
    nodes = gathers(graph)
    if not nodes:
        return graph
    small = [node for node in nodes if _bytes(node) <= small_bytes]
    large = [node for node in nodes if _bytes(node) > small_bytes]
    limit = min(group_bytes, max(sum(map(_bytes, large)) // parts, 1))
    groups = _consecutive(large, limit)
    first = next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
    with graph.inserting_before(first):
        beginning = graph.call_function(_marker)
    for group in _by_dtype(small):
        _launch(graph, group, beginning, world_size)
    heads = [group[0] for group in groups]  # where each group is first waited for
    for number, group in enumerate(groups):
        before = heads[number - ahead] if number >= ahead else beginning
        heads[number] = _launch(graph, group, before, world_size)
    graph.erase_node(beginning)
    for node in nodes:
        graph.erase_node(node)
    return graph


def _marker() -> None:
    """Holds a place in the graph while nodes around it are replaced."""


def _by_dtype(nodes: list[Node]) -> list[list[Node]]:
    groups: dict[torch.dtype, list[Node]] = {}
    for node in nodes:
        groups.setdefault(_dtype(node), []).append(node)
    return list(groups.values())


def _consecutive(nodes: list[Node], limit: int) -> list[list[Node]]:
    groups: list[list[Node]] = []
    held = 0
    for node in nodes:
        if not groups or held + _bytes(node) > limit or _dtype(groups[-1][0]) != _dtype(node):
            groups.append([])
            held = 0
        groups[-1].append(node)
        held += _bytes(node)
    return groups


def _launch(graph: Graph, group: list[Node], before: Node, world_size: int) -> Node:
    """Starts ``group`` before a node and waits where its first member stood; returns the wait."""
    lengths = [world_size * _shard(node).meta["val"].numel() for node in group]
    with graph.inserting_before(before):
        start = graph.call_function(
            ops("gather_group"), ([_shard(node) for node in group], _dtype(group[0]), sum(lengths))
        )
    with graph.inserting_before(group[0]):
        ready = graph.call_function(_wait, (start,))
    buffer = group[0].meta["val"].new_empty(sum(lengths))
    start.meta["val"] = ready.meta["val"] = buffer
    offset = 0
    for node, length in zip(group, lengths, strict=True):
        numel = node.meta["val"].numel()
        with graph.inserting_before(node):
            flat = graph.call_function(_slice, (ready, 0, offset, offset + numel))
            weight = graph.call_function(_view, (flat, list(node.meta["val"].shape)))
        flat.meta["val"] = buffer[offset : offset + numel]
        weight.meta.update({key: meta for key, meta in node.meta.items() if key not in ("recompute", "val")})
        weight.meta["val"] = flat.meta["val"].view(node.meta["val"].shape)
        node.replace_all_uses_with(weight)
        offset += length
    return ready


def _shard(node: Node) -> Node:
    shard = node.args[0]
    assert isinstance(shard, Node)
    return shard


def _dtype(node: Node) -> torch.dtype:
    dtype = node.args[2]
    assert isinstance(dtype, torch.dtype)
    return dtype


def _bytes(node: Node) -> int:
    return node.meta["val"].numel() * _dtype(node).itemsize
