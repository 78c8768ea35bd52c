"""What is kept of a graph: its text, its memory and its streams, against values worked out by hand."""

import pytest
import torch

from lightning_zero.compile.passes.announce import announce_plan, read_plan
from lightning_zero.compile.passes.group import group_gathers
from lightning_zero.compile.passes.grouping import GroupLimits
from lightning_zero.compile.plan import Gather, GraphPlan, Reduce
from lightning_zero.compile.readable import readable
from lightning_zero.profiling.bandwidth import BandwidthTable
from lightning_zero.profiling.cost import DeviceSpeed, NodeCost
from lightning_zero.report.summary import streams, summarise
from lightning_zero.report.timeline import Interval
from tests.unit.compile.graphs import Builder

aten = torch.ops.aten
SPEED = DeviceSpeed({torch.float32: 1e12}, 10.0, 0.0)
COSTS = (NodeCost("a"), NodeCost("b", seconds=2.0), NodeCost("c", seconds=3.0), NodeCost("d", seconds=1.0))


def gather(*weights: str, size: int, started: int, waited: int) -> Gather:
    return Gather(weights, "float32", size, started, "?", waited, "?")


def test_nodes_are_numbered_as_in_plans_and_the_announced_plan_is_cut_short() -> None:
    b = Builder()
    shard, x = b.shard("w", 2048), b.input("x", 64, 64)
    graph = announce_plan(
        group_gathers(b.done(b.call(aten.mm.default, x, b.gather(shard, 64, 64))), 2, GroupLimits(1 << 20))
    )
    plan = read_plan(graph)
    (gathered,) = plan.gathers
    numbered = {line[:5].strip(): line[7:] for line in readable(graph).splitlines() if line[:5].strip()}
    assert len(numbered) == plan.nodes
    assert numbered[str(gathered.started)].split(" = ")[1].startswith("lightning_zero.gather_group.default([w]")
    assert numbered[str(gathered.waited)].split(" = ")[1].startswith("_c10d_functional.wait_tensor.default(")
    (announced,) = [line for line in readable(graph).splitlines() if "lightning_zero.check_plan" in line]
    assert announced.startswith("       ")
    assert len(announced) < 200
    found = summarise("", graph, plan, SPEED, None)
    assert found.timeline is not None
    # The only gather starts at the beginning, and the product needs it at once: 16384 bytes at 10 bytes a second.
    assert found.timeline.exposed == (pytest.approx(1638.4),)


def test_a_plan_of_another_graph_is_refused() -> None:
    with pytest.raises(ValueError, match="plan is for 5 nodes, and there are 4"):
        streams(COSTS, GraphPlan("forward", 5, (), ()), SPEED, None)


def test_the_streams_follow_the_plan_and_the_table() -> None:
    table = BandwidthTable(2, ((10, 1.0), (100, 4.0)), ((10, 1.0), (100, 10.0)))
    plan = GraphPlan(
        "backward",
        4,
        (gather("v", "w", size=100, started=1, waited=2),),
        (Reduce(("v",), "float32", 20, 2), Reduce(("w",), "float32", 30, 3)),
    )
    found = streams(COSTS, plan, SPEED, table).run()
    assert found.gathers == (Interval(0, 4, "v and 1 more"),)
    assert found.exposed == (2,)
    assert found.compute == (Interval(0, 2, "b"), Interval(4, 7, "c"), Interval(7, 8, "d"))
    # 50 bytes together take 5 seconds: 2 for 20 bytes, 3 for 30
    assert [(r.label, r.start, r.end) for r in found.reduces] == [
        ("v", 7, pytest.approx(9)),
        ("w", pytest.approx(9), pytest.approx(12)),
    ]


def test_without_a_table_transfers_are_copies() -> None:
    plan = GraphPlan("forward", 4, (gather("w", size=30, started=1, waited=1),), (Reduce(("w",), "float32", 20, 3),))
    found = streams(COSTS, plan, SPEED, None).run()
    assert found.gathers == (Interval(0, 3, "w"),)
    assert found.reduces[0].end - found.reduces[0].start == pytest.approx(2)


def test_saved_activations_go_with_their_last_use_in_backward_and_parameters_stay() -> None:
    b = Builder()
    weight, saved, tangent = b.input("primals_1", 10), b.input("mul", 10), b.input("tangents_1", 10)
    product = b.call(aten.mul.Tensor, saved, tangent)
    result = b.call(aten.mul.Tensor, product, weight)
    last = b.call(aten.exp.default, result)
    found = summarise("", b.done(last), None, SPEED, None)
    assert found.kind == "backward"
    assert [point.after for point in found.memory.points] == [120, 120, 120, 80, 80, 80, 80]


def test_inputs_stay_in_forward() -> None:
    b = Builder()
    x = b.input("x", 10)
    found = summarise("before", b.done(b.call(aten.exp.default, x)), None, SPEED, None)
    assert (found.kind, found.before, found.timeline) == ("forward", "before", None)
    assert [point.after for point in found.memory.points] == [40, 80, 80]
    assert [cost.seconds for cost in found.costs] == [8]
