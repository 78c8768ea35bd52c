"""What one pass did to one graph, for somebody who debugs it: nodes added, removed, changed and moved, as a diff, and
the time that it took.

Texts and numbers only: a graph that is kept keeps its compilation alive.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import unified_diff
from time import perf_counter

from torch.fx import Graph

from lightning_zero.compile.readable import format_nodes

__all__ = ["PassTrace", "trace_pass"]

CONTEXT_LINES = 2  # of the diff


@dataclass(frozen=True)
class PassTrace:
    """One run of one pass.

    Attributes:
        name: of the pass.
        milliseconds: in the pass alone, on the host.
        nodes: of the graph, afterwards.
        added: names of nodes that were not there before.
        removed: names of nodes that are not there any more.
        changed: names of nodes with another op, other arguments or another result.
        moved: names of nodes that are the same, but elsewhere among the others.
        diff: unified, a line for each node; empty where nothing was done.
    """

    name: str
    milliseconds: float
    nodes: int
    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[str, ...]
    moved: tuple[str, ...]
    diff: str


def trace_pass(graph: Graph, name: str, apply: Callable[[Graph], Graph]) -> tuple[Graph, PassTrace]:
    """Applies the pass of that name: the graph that it returns, and what it did."""
    before = dict(format_nodes(graph))
    begun = perf_counter()
    graph = apply(graph)
    milliseconds = (perf_counter() - begun) * 1e3
    after = dict(format_nodes(graph))
    lines = list(
        unified_diff(
            list(before.values()), list(after.values()), "before", f"after {name}", lineterm="", n=CONTEXT_LINES
        )
    )
    touched = {line[1:] for line in lines[2:] if line.startswith("+")}
    return graph, PassTrace(
        name,
        milliseconds,
        len(graph.nodes),
        tuple(node for node in after if node not in before),
        tuple(node for node in before if node not in after),
        tuple(node for node, line in after.items() if before.get(node, line) != line),
        tuple(node for node, line in after.items() if before.get(node) == line and line in touched),
        "".join(f"{line}\n" for line in lines),
    )
