"""Which gathers share a launch, and where each launch goes. What the passes that launch groups have in common."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from lightning_zero.compile.graph import first_call, kind_of, weight_name
from lightning_zero.compile.plan import GraphPlan
from lightning_zero.profiling.tensors import nbytes

__all__ = ["consecutive", "dtype_of", "follow", "places", "size_of", "word"]

Group = list[Node]


def consecutive(
    nodes: Sequence[Node],
    limit: int,
    size: Callable[[Node], int],
    kind: Callable[[Node], Any] = lambda node: None,
) -> list[Group]:
    """Cuts a list of nodes into groups of one kind and at most ``limit`` bytes; a larger node is alone."""
    groups: list[Group] = []
    held = 0
    for node in nodes:
        if not groups or held + size(node) > limit or kind(groups[-1][0]) != kind(node):
            groups.append([])
            held = 0
        groups[-1].append(node)
        held += size(node)
    return groups


def follow(graph: Graph, nodes: Sequence[Node], agreed: Sequence[GraphPlan], kept: bool) -> list[Group] | None:
    """The groups of exactly these weights in a plan that ranks have agreed on, or None when there is none.

    ``kept``: of the weights that stay until the optimizer steps, otherwise of the others.
    """
    mine = Counter((weight_name(node), word(dtype_of(node))) for node in nodes)
    for plan in agreed:
        gathers = [gather for gather in plan.gathers if (gather.until == "step") is kept]
        if plan.kind != kind_of(graph) or mine != Counter((name, g.dtype) for g in gathers for name in g.weights):
            continue
        waiting: dict[tuple[str, str], deque[Node]] = {}
        for node in nodes:
            waiting.setdefault((weight_name(node), word(dtype_of(node))), deque()).append(node)
        return [[waiting[name, g.dtype].popleft() for name in g.weights] for g in gathers]
    return None


def places(graph: Graph, groups: Sequence[Group], at_once: list[bool], ahead: int) -> tuple[list[Node], list[Node]]:
    """The nodes that each group is started before, and waited for before.

    A group is waited for at its first use. It is started in the order of the groups, and never behind that.

    Args:
        at_once: whether a group is started at the beginning.
        ahead: others are started where the group that comes ``ahead`` before is first used.
    """
    anchors = list(graph.nodes)
    position = {node: number for number, node in enumerate(anchors)}
    waits = [min(position[node] for node in group) for group in groups]
    large = [number for number, small in enumerate(at_once) if not small]
    starts = [position[first_call(graph)]] * len(waits)
    for rank, number in enumerate(large):
        if rank >= ahead:
            starts[number] = min(waits[large[rank - ahead]], waits[number])
    for number in reversed(range(len(starts) - 1)):
        starts[number] = min(starts[number], starts[number + 1])
    return [anchors[start] for start in starts], [anchors[wait] for wait in waits]


def word(dtype: torch.dtype) -> str:
    """``"bfloat16"``"""
    return str(dtype).removeprefix("torch.")


def dtype_of(node: Node) -> torch.dtype:
    """That a gather gathers in."""
    dtype = node.args[2]
    assert isinstance(dtype, torch.dtype)
    return dtype


def size_of(node: Node) -> int:
    """Bytes of a gathered weight, without padding."""
    return nbytes(node.meta["val"])
