"""How long a pass forward and backward waits for transfers, by the plans of its graphs.

Nothing measures that without slowing the pass down. Plans hold estimates of compute and of transfers, from what the
engine has measured of the device and of the links; where it is known how long a pass really takes, compute is corrected
by one factor, as in a :class:`~lightning_zero.report.PlanReport`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from lightning_zero.compile.plan import GraphPlan, Plan
from lightning_zero.report.correction import compute_factor
from lightning_zero.report.timeline import Compute, Gather, Reduce, Streams

__all__ = ["exposed_seconds", "plan_streams", "step_plans"]


def step_plans(plan: Plan, gathered: int) -> list[GraphPlan] | None:
    """The graphs of a pass: of those of one kind for the same weights, the ones that came last, and each once. None
    where these gather other bytes than a pass does: then they are not what it runs."""
    latest: dict[object, GraphPlan] = {}
    for graph in plan.graphs:
        touched = graph.gathers if graph.kind == "forward" else graph.reduces
        latest[graph.kind, frozenset(name for entry in touched for name in entry.weights)] = graph
    graphs = list(latest.values())
    return graphs if sum(gather.bytes for graph in graphs for gather in graph.gathers) == gathered else None


def plan_streams(graph: GraphPlan) -> Streams | None:
    """What a graph's streams have to do; None where its plan has no seconds. Nodes between two places at which
    something starts or is waited for are one; the first and the last take no time."""
    if not graph.compute_s:
        return None
    places = {0.0, graph.compute_s, *(reduce.at_s for reduce in graph.reduces)}
    for gather in graph.gathers:
        places |= {gather.started_s, gather.waited_s}
    ordered = sorted(places)
    number = {place: index for index, place in enumerate(ordered)}
    spans = [Compute("", 0.0), *(Compute("", after - before) for before, after in pairwise(ordered)), Compute("", 0.0)]
    gathers = tuple(
        Gather(g.weights[0], number[g.started_s] + 1, number[g.waited_s] + 1, g.transfer_s) for g in graph.gathers
    )
    reduces = tuple(Reduce(r.weights[0], number[r.at_s], r.transfer_s) for r in graph.reduces)
    return Streams(tuple(spans), gathers, reduces)


def exposed_seconds(graphs: Sequence[GraphPlan], pass_s: float | None = None) -> float | None:
    """In which compute stands idle for weights, or gradients are on their way after the last node.

    Args:
        pass_s: how long the graphs together really took; None where that is not known.

    Returns:
        None where some plan has no seconds.
    """
    streams = [plan_streams(graph) for graph in graphs]
    known = [one for one in streams if one is not None]
    if not known or len(known) < len(streams):
        return None
    # Where transfers alone are estimated to take longer than the pass did, nothing is corrected.
    factor = (None if pass_s is None else compute_factor(known, pass_s)) or 1.0
    runs = [one.run(factor) for one in known]
    return sum(sum(run.exposed) + run.tail for run in runs)
