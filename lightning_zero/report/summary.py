"""What a report keeps of one compiled graph: text and numbers, none of the graph itself.

Graphs hold fake tensors and whatever those hold; a graph that is kept keeps its compilation alive. Nodes are numbered
as in plans: inputs, the output and the announcement of the plan have no number.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.fx import Graph, Node

from lightning_zero.compat.ops import OpOverload
from lightning_zero.compile.graph import kind_of
from lightning_zero.compile.plan import GraphPlan
from lightning_zero.profiling.bandwidth import BandwidthTable
from lightning_zero.profiling.cost import DeviceSpeed, NodeCost, graph_costs
from lightning_zero.report.memory import MemoryTimeline, memory_timeline
from lightning_zero.report.timeline import Compute, Gather, Reduce, Streams, Timeline

__all__ = ["GraphSummary", "readable", "streams", "summarise"]


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
    """

    kind: str
    before: str
    after: str
    costs: tuple[NodeCost, ...]
    memory: MemoryTimeline
    plan: GraphPlan | None
    streams: Streams | None
    timeline: Timeline | None


def summarise(
    before: str, graph: Graph, plan: GraphPlan | None, speed: DeviceSpeed, bandwidth: BandwidthTable | None
) -> GraphSummary:
    """Looks at a graph after the passes.

    Args:
        before: its text before the passes.
        bandwidth: without one, a transfer takes as long as a copy on the device does.
    """
    kind = kind_of(graph)
    costs = tuple(cost for node, cost in zip(graph.nodes, graph_costs(graph, speed), strict=True) if _counts(node))
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


def readable(graph: Graph) -> str:
    """A line for each node: its number, name, op, arguments, and the shape of its result."""
    lines, number = [], 0
    for node in graph.nodes:
        shape = _shape(node.meta.get("val"))
        shown = str(number) if _counts(node) else ""
        number += _counts(node)
        lines.append(f"{shown:>5}  {_call(node)}{f'  # {shape}' if shape else ''}\n")
    return "".join(lines)


def _counts(node: Node) -> bool:
    """Whether plans number the node."""
    return node.op not in ("placeholder", "get_attr", "output") and str(node.target) != "lightning_zero.enter.default"


def _call(node: Node) -> str:
    if node.op == "output":
        return f"return {node.args[0]}"
    if node.op in ("placeholder", "get_attr"):
        return f"{node.name} = {node.op}" + (f" {node.target}" if node.target != node.name else "")
    arguments = [*map(_argument, node.args), *(f"{name}={_argument(value)}" for name, value in node.kwargs.items())]
    target = node.target
    name = str(target) if isinstance(target, str | OpOverload) else getattr(target, "__name__", str(target))
    return f"{node.name} = {name}({', '.join(arguments)})"


def _argument(value: object, most: int = 60) -> str:
    # A plan is announced in a text as long as the plan; other texts are short.
    return f"{value[:most]!r}..." if isinstance(value, str) and len(value) > most else str(value)


def _shape(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, tuple | list):
        return ", ".join(map(_shape, value))
    return "" if value is None else str(value)


def _outlives_backward(node: Node) -> bool:
    """Parameters and the forward graph's inputs belong to somebody else; what was saved goes with its last use."""
    return node.op == "get_attr" or node.name.startswith("primals")


def _names(weights: tuple[str, ...]) -> str:
    return weights[0] + (f" and {len(weights) - 1} more" if len(weights) > 1 else "")
