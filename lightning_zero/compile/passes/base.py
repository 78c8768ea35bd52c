"""Definition of graph passes, the loop that runs them, and traces of their effect.

A pass takes a partitioned forward, backward or inference graph and returns a graph. It calls no collective, touches no
device and keeps no state. Equal graphs therefore give equal results on every rank, and tests need no process group.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import unified_diff
from time import perf_counter

from torch.fx import Graph, Node

from lightning_zero.compile.fx_utils import format_nodes

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PassSpec:
    """A graph pass and its contract.

    Attributes:
        name: Unique name in schedules and reports.
        apply: The pass: changes a ``torch.fx.Graph`` and returns it.
        requires: Properties that earlier passes must provide.
        provides: Properties that hold afterwards.
        conflicts: Properties that must not hold before.
        version: Version of a user's pass. Change it with the pass, so that the compiler's cache can serve its graphs.
            None disables the cache for them.

    Examples:
        >>> from lightning_zero import PassSpec
        >>> PassSpec("my_pass", lambda graph: graph, requires=frozenset({"ordered"})).name
        'my_pass'
    """

    name: str
    apply: Callable[[Graph], Graph]
    requires: frozenset[str] = frozenset()
    provides: frozenset[str] = frozenset()
    conflicts: frozenset[str] = frozenset()
    version: str | None = None


def check_contracts(passes: Sequence[PassSpec]) -> set[str]:
    """Return the properties provided after all passes.

    Raises:
        ValueError: a pass precedes what it requires, or follows what it conflicts with.
    """
    provided: set[str] = set()
    for spec in passes:
        missing, clashing = spec.requires - provided, spec.conflicts & provided
        if missing:
            raise ValueError(
                f"Pass {spec.name!r} requires {sorted(missing)}, which no earlier pass provides. Put one before it."
            )
        if clashing:
            raise ValueError(
                f"Pass {spec.name!r} conflicts with {sorted(clashing)}, provided by an earlier pass. Remove one of "
                "them."
            )
        provided |= spec.provides
    return provided


def run_passes(
    graph: Graph,
    passes: Sequence[PassSpec],
    watch: Callable[[PassTrace], None] | None = None,
    check_each: bool = True,
) -> Graph:
    """Run passes in order and check the graph.

    Args:
        watch: receives the effect of each pass, which costs time.
        check_each: lint after each pass, which takes as long as the passes on large graphs. Otherwise check once that
            nodes read only earlier nodes.
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
    """Return True if nodes read only earlier nodes and have unique names; lint() explains if not."""
    before: set[Node] = set()
    for node in graph.nodes:
        if not before.issuperset(node.all_input_nodes):
            return False
        before.add(node)
    return len({node.name for node in before}) == len(before)


CONTEXT_LINES = 2  # lines of the diff


@dataclass(frozen=True)
class PassTrace:
    """Effect of one pass on one graph.

    It has only text and numbers: a graph would keep its compilation alive.

    Attributes:
        name: of the pass.
        milliseconds: of the pass alone, on the host.
        nodes: number of nodes afterwards.
        added: names of new nodes.
        removed: names of removed nodes.
        changed: names of nodes with another op, arguments or result.
        moved: names of equal nodes at another position.
        diff: unified diff with a line per node; empty without changes.
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
