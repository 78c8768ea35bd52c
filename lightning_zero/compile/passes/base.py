"""What a pass is, and the loop that runs passes.

A pass takes a forward, backward or inference graph, after partitioning, and returns a graph. It calls no collective,
touches no device and keeps no state, so that every rank gets the same result from the same graph and a test needs no
process group.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch.fx import Graph, Node

from lightning_zero.compile.passes.pass_trace import PassTrace, trace_pass

__all__ = ["PassSpec", "run_passes"]

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
