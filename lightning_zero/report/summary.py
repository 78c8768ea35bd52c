"""What a report keeps of one compiled graph: text and numbers, none of the graph itself.

Graphs hold fake tensors and whatever those hold; a graph that is kept keeps its compilation alive. Nodes are numbered
as in plans: inputs, the output and the announcement of the plan have no number.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Graph, Node

from lightning_zero.compile.graph import kind_of
from lightning_zero.compile.passes.trace import PassTrace
from lightning_zero.compile.plan import GraphPlan
from lightning_zero.compile.readable import counts, readable
from lightning_zero.profiling.bandwidth import BandwidthTable
from lightning_zero.profiling.cost import DeviceSpeed, NodeCost, graph_costs
from lightning_zero.report.memory import MemoryTimeline, memory_timeline
from lightning_zero.report.timeline import Compute, Gather, Reduce, Streams, Timeline

__all__ = ["GraphSummary", "streams", "summarise"]


@dataclass(frozen=True)
class GraphSummary:
    """One graph.

    Attributes:
        kind: ``"forward"`` or ``"backward"``.
        before: the graph's text before the passes.
        after: its text after them.
        costs: of each numbered node after the passes.
        memory: after the passes, of all nodes.
        plan: what it gathers and reduces, where that is known.
        streams: what its streams have to do, where there is a plan.
        timeline: how they do it.
        passes: what each pass did, where that is wanted.
    """

    kind: str
    before: str
    after: str
    costs: tuple[NodeCost, ...]
    memory: MemoryTimeline
    plan: GraphPlan | None
    streams: Streams | None
    timeline: Timeline | None
    passes: tuple[PassTrace, ...] = ()


def summarise(
    before: str, graph: Graph, plan: GraphPlan | None, speed: DeviceSpeed, bandwidth: BandwidthTable | None
) -> GraphSummary:
    """Looks at a graph after the passes.

    Args:
        before: its text before the passes.
        bandwidth: without one, a transfer takes as long as a copy on the device does.
    """
    kind = kind_of(graph)
    costs = tuple(cost for node, cost in zip(graph.nodes, graph_costs(graph, speed), strict=True) if counts(node))
    work = None if plan is None else streams(costs, plan, speed, bandwidth)
    return GraphSummary(
        kind=kind,
        before=before,
        after=readable(graph),
        costs=costs,
        memory=memory_timeline(graph, keep=lambda node: kind == "forward" or _outlives_backward(node)),
        plan=plan,
        streams=work,
        timeline=None if work is None else work.run(),
    )


def streams(
    costs: tuple[NodeCost, ...], plan: GraphPlan, speed: DeviceSpeed, bandwidth: BandwidthTable | None
) -> Streams:
    """The streams of a graph whose numbered nodes cost that much.

    Gradients travel in buckets, so together they are given the time of one large transfer, each its share.

    Raises:
        ValueError: the plan is one of another graph.
    """
    if plan.nodes != len(costs):
        raise ValueError(f"The plan is for {plan.nodes} nodes, and there are {len(costs)}.")
    reduced = sum(reduce.bytes for reduce in plan.reduces)
    copied = 1 / speed.bytes_per_s
    gathers = tuple(
        Gather(
            _names(gather.weights),
            gather.started,
            gather.waited,
            bandwidth.gather_seconds(gather.bytes) if bandwidth else gather.bytes * copied,
        )
        for gather in plan.gathers
    )
    per_byte = bandwidth.reduce_seconds(reduced) / reduced if bandwidth and reduced else copied
    reduces = tuple(Reduce(_names(reduce.weights), reduce.at, reduce.bytes * per_byte) for reduce in plan.reduces)
    return Streams(tuple(Compute(cost.name, cost.seconds) for cost in costs), gathers, reduces)


def _outlives_backward(node: Node) -> bool:
    """Parameters and the forward graph's inputs belong to somebody else; what was saved goes with its last use."""
    return node.op == "get_attr" or node.name.startswith("primals")


def _names(weights: tuple[str, ...]) -> str:
    return weights[0] + (f" and {len(weights) - 1} more" if len(weights) > 1 else "")
