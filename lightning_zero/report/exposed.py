"""Estimate how long a pass forward and backward waits for transfers, by the plans of its graphs.

A measurement would slow the pass down. Plans hold estimates of compute and of transfers from the measured speeds of the
device and of the links. If the real time of a pass is known, one factor corrects compute.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_zero.compile.graph_plan import GraphPlan, Plan

__all__ = ["exposed_seconds", "pass_plans"]

HALVINGS = 40
REDUCE, START, WAIT = range(3)  # in this order if they are at the same place


def pass_plans(plan: Plan, gathered: int) -> list[GraphPlan] | None:
    """Return the graphs of a pass: the last one of each kind for the same weights.

    Args:
        plan: of all graphs.
        gathered: bytes that a pass gathers.

    Returns:
        None if these graphs gather other bytes, so that a pass does not run each of them once.
    """
    latest: dict[object, GraphPlan] = {}
    for graph in plan.graphs:
        touched = graph.gathers if graph.kind == "forward" else graph.reduces
        latest[graph.kind, frozenset(name for entry in touched for name in entry.weights)] = graph
    graphs = list(latest.values())
    return graphs if sum(gather.bytes for graph in graphs for gather in graph.gathers) == gathered else None


def exposed_seconds(graphs: Sequence[GraphPlan], pass_s: float | None = None) -> float | None:
    """Return the seconds in which compute waits for weights, or gradients are reduced after the last node.

    Args:
        graphs: of the pass.
        pass_s: measured seconds of the graphs together; None if unknown.

    Returns:
        None if some plan has no seconds.
    """
    computed = sum(graph.compute_s for graph in graphs)
    if not graphs or not all(graph.compute_s for graph in graphs):
        return None
    factor = 1.0
    # If transfers alone are estimated to take longer than the pass did, nothing is corrected.
    if pass_s is not None and _run(graphs, 0.0)[0] < pass_s:
        low, factor = 0.0, pass_s / computed  # the latter is right if no transfer is exposed
        for _ in range(HALVINGS):
            middle = (low + factor) / 2
            low, factor = (middle, factor) if _run(graphs, middle)[0] < pass_s else (low, middle)
    return _run(graphs, factor)[1]


def _run(graphs: Sequence[GraphPlan], factor: float) -> tuple[float, float]:
    """Return the seconds of all graphs, and the exposed ones, if compute takes ``factor`` times as long as planned.

    Gathers run one after another on a stream of their own, and so do reductions.
    """
    seconds = exposed = 0.0
    for graph in graphs:
        events = [(gather.started_s, START, n) for n, gather in enumerate(graph.gathers)]
        events += [(gather.waited_s, WAIT, n) for n, gather in enumerate(graph.gathers)]
        events += [(reduce.at_s, REDUCE, n) for n, reduce in enumerate(graph.reduces)]
        now = at = gathers_end = reduces_end = waited = 0.0
        ends: dict[int, float] = {}
        for place, what, number in sorted(events):
            now, at = now + (place - at) * factor, place
            if what == START:
                gathers_end = ends[number] = max(now, gathers_end) + graph.gathers[number].transfer_s
            elif what == WAIT:
                waited += max(ends[number] - now, 0.0)
                now = max(now, ends[number])
            else:
                reduces_end = max(now, reduces_end) + graph.reduces[number].transfer_s
        now += (graph.compute_s - at) * factor
        seconds += max(now, gathers_end, reduces_end)
        exposed += waited + max(reduces_end - now, 0.0)
    return seconds, exposed
