"""Which gathers share a launch. What the passes that launch groups have in common.

Groups follow from the weights alone, their order of use and their sizes: ranks whose batches have other shapes must
come to the same ones.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from lightning_zero.compile.graph import graph_kind, weight_name
from lightning_zero.compile.plan import GraphPlan
from lightning_zero.profiling.graph_tensors import nbytes

__all__ = ["GroupLimits", "split_into_groups", "dtype_name", "dtype_of", "groups_of_plan", "max_group_bytes", "size_of"]

Group = list[Node]


@dataclass(frozen=True)
class GroupLimits:
    """How large groups of gathers get.

    Attributes:
        group_bytes: at most so many bytes in a group; a larger weight is a group of its own.
        small_bytes: weights of at most this size are gathered together at the beginning of a graph.
        parts: smaller groups where a graph gathers little: about this many for the whole graph.
        first: shares of a group's bytes that the first groups may have, see :func:`split_into_groups`.
    """

    group_bytes: int
    small_bytes: int = 0
    parts: int = 1
    first: tuple[float, ...] = ()

    def max_group_bytes(self, sizes: Iterable[int]) -> int:
        """What a group of a graph that gathers weights of these sizes may hold."""
        return max_group_bytes(sizes, self.group_bytes, self.parts)


def split_into_groups(
    nodes: Sequence[Node],
    limit: int,
    size: Callable[[Node], int],
    kind: Callable[[Node], Any] = lambda node: None,
    first: Sequence[float] = (),
) -> list[Group]:
    """Cuts a list of nodes into groups of one kind and at most ``limit`` bytes; a larger node is alone.

    ``first``: shares of ``limit`` that hold for the first groups instead, one after the other; 0 for a single node.
    """
    groups: list[Group] = []
    held, most = 0, 0.0
    for node in nodes:
        if not groups or held + size(node) > most or kind(groups[-1][0]) != kind(node):
            most = limit * first[len(groups)] if len(groups) < len(first) else limit
            groups.append([])
            held = 0
        groups[-1].append(node)
        held += size(node)
    return groups


def max_group_bytes(sizes: Iterable[int], group_bytes: int, parts: int) -> int:
    """What a group of a graph may hold: ``group_bytes``, or less for about ``parts`` groups where there is little."""
    return min(group_bytes, max(sum(sizes) // parts, 1))


def groups_of_plan(
    graph: Graph, nodes: Sequence[Node], agreed_plans: Sequence[GraphPlan], resident: bool
) -> list[Group] | None:
    """The groups of exactly these weights in a plan that ranks have agreed on, or None when there is none.

    ``resident``: of the weights that stay until the optimizer steps, otherwise of the others.
    """
    mine = Counter((weight_name(node), dtype_name(dtype_of(node))) for node in nodes)
    for plan in agreed_plans:
        gathers = [gather for gather in plan.gathers if (gather.until == "step") is resident]
        if plan.kind != graph_kind(graph) or mine != Counter((name, g.dtype) for g in gathers for name in g.weights):
            continue
        waiting: dict[tuple[str, str], deque[Node]] = {}
        for node in nodes:
            waiting.setdefault((weight_name(node), dtype_name(dtype_of(node))), deque()).append(node)
        return [[waiting[name, g.dtype].popleft() for name in g.weights] for g in gathers]
    return None


def dtype_name(dtype: torch.dtype) -> str:
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
