"""Which gathers share a launch, and where each launch goes. What the passes that launch groups have in common."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from lightning_zero.compile.graph import is_backward, weight_name
from lightning_zero.compile.plan import GraphPlan

__all__ = ["consecutive", "dtype_of", "follow", "size_of", "starts", "word"]

Group = list[Node]


def consecutive(nodes: Sequence[Node], limit: int, kind: Callable[[Node], Any]) -> list[Group]:
    """Cuts a list of gathers into groups of one kind and at most ``limit`` bytes; a larger one is alone."""
    groups: list[Group] = []
    held = 0
    for node in nodes:
        if not groups or held + size_of(node) > limit or kind(groups[-1][0]) != kind(node):
            groups.append([])
            held = 0
        groups[-1].append(node)
        held += size_of(node)
    return groups


def follow(graph: Graph, nodes: Sequence[Node], agreed: Sequence[GraphPlan], kept: bool) -> list[Group] | None:
    """The groups of exactly these weights in a plan that ranks have agreed on, or None when there is none.

    ``kept``: of the weights that stay until the optimizer steps, otherwise of the others.
    """
    kind = "backward" if is_backward(graph) else "forward"
    mine = Counter((weight_name(node), word(dtype_of(node))) for node in nodes)
    for plan in agreed:
        gathers = [gather for gather in plan.gathers if (gather.until == "step") is kept]
        if plan.kind != kind or mine != Counter((name, g.dtype) for g in gathers for name in g.weights):
            continue
        waiting: dict[tuple[str, str], deque[Node]] = {}
        for node in nodes:
            waiting.setdefault((weight_name(node), word(dtype_of(node))), deque()).append(node)
        return [[waiting[name, g.dtype].popleft() for name in g.weights] for g in gathers]
    return None


def starts(waits: list[int], at_once: list[bool], beginning: int, ahead: int) -> list[int]:
    """Where each group is started: in the order of the groups, and never behind where it is waited for.

    Args:
        waits: position of each group's first use.
        at_once: whether a group is started at the beginning.
        beginning: the first position.
        ahead: others are started where the group that comes ``ahead`` before is first used.
    """
    large = [number for number, small in enumerate(at_once) if not small]
    found = [beginning] * len(waits)
    for rank, number in enumerate(large):
        if rank >= ahead:
            found[number] = min(waits[large[rank - ahead]], waits[number])
    for number in reversed(range(len(found) - 1)):
        found[number] = min(found[number], found[number + 1])
    return found


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
    return int(node.meta["val"].numel()) * dtype_of(node).itemsize
