"""What a pass is, and the loop that runs passes.

A pass takes a forward, backward or inference graph, after partitioning, and returns a graph. It calls no collective,
touches no device and keeps no state, so that every rank gets the same result from the same graph and a test needs no
process group.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import unified_diff
from time import perf_counter

from torch.fx import Graph, Node

from lightning_zero.compile.fx_utils import format_nodes

__all__ = ["PassSpec", "PassTrace", "run_passes", "trace_pass"]


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PassSpec:
    """A pass and its contract.

    Attributes:
        name: unique; what schedules and reports call it.
        apply: the pass.
        requires: properties that earlier passes must have provided.
        provides: properties that hold afterwards.
        conflicts: properties that must not hold before.
        version: of a pass of your own: another text whenever it changes, so that graphs it has rewritten may come out
            of the compiler's cache; None keeps them out.
    """

    name: str
    apply: Callable[[Graph], Graph]
    requires: frozenset[str] = frozenset()
    provides: frozenset[str] = frozenset()
    conflicts: frozenset[str] = frozenset()
    version: str | None = None


def check_contracts(passes: Sequence[PassSpec]) -> set[str]:
    """What the graph provides after all passes.

    Raises:
        ValueError: a pass comes before what it requires, or after what it conflicts with.
    """
    held: set[str] = set()
    for spec in passes:
        missing, clashing = spec.requires - held, spec.conflicts & held
        if missing:
            raise ValueError(
                f"Pass {spec.name!r} requires {sorted(missing)}, which no earlier pass provides. Put one before it."
            )
        if clashing:
            raise ValueError(
                f"Pass {spec.name!r} conflicts with {sorted(clashing)}, provided by an earlier pass. Remove one of "
                "them."
            )
        held |= spec.provides
    return held


def run_passes(
    graph: Graph,
    passes: Sequence[PassSpec],
    watch: Callable[[PassTrace], None] | None = None,
    check_each: bool = True,
) -> Graph:
    """Runs ``passes`` in order and checks the graph.

    Args:
        watch: is told what each did, which takes time.
        check_each: all that torch can check, after each pass, which for a large graph takes as long as the passes
            themselves; otherwise once, whether nodes read what stands before them.
    """
    check_contracts(passes)
    for spec in passes:
        if watch is None:
            graph = spec.apply(graph)
        else:
            graph, trace = trace_pass(graph, spec.name, spec.apply)
            watch(trace)
        if check_each or (spec is passes[-1] and not _in_order(graph)):
            graph.lint()
        log.debug("after %s: %s", spec.name, graph)
    return graph


def _in_order(graph: Graph) -> bool:
    """Whether each node reads what stands before it, and has a name of its own; if not, torch says more."""
    before: set[Node] = set()
    for node in graph.nodes:
        if not before.issuperset(node.all_input_nodes):
            return False
        before.add(node)
    return len({node.name for node in before}) == len(before)


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
