"""What somebody who debugs passes is told of each: which nodes, as a diff, and the time."""

import time

import torch
from torch.fx import Graph

from lightning_zero.compile.context import PassContext
from lightning_zero.compile.passes import PassSpec, default_passes, run_passes
from lightning_zero.compile.passes.base import PassTrace
from lightning_zero.config import CompileConfig
from tests.unit.compile.graphs import Builder, order, products

aten = torch.ops.aten


def runs(graph: Graph, *passes: PassSpec) -> list[PassTrace]:
    seen: list[PassTrace] = []
    run_passes(graph, passes, seen.append)
    return seen


def swap(graph: Graph) -> Graph:
    """Removes a relu, adds a neg, changes what a product reads and moves the gather behind the first node."""
    relu = graph.find_nodes(op="call_function", target=aten.relu.default)[0]
    with graph.inserting_before(relu):
        neg = graph.call_function(aten.neg.default, relu.args)
    neg.meta["val"] = relu.meta["val"]
    relu.replace_all_uses_with(neg)
    graph.erase_node(relu)
    gather = graph.find_nodes(op="call_function", target=torch.ops.lightning_zero.gather.default)[0]
    neg.append(gather)
    return graph


def small() -> Graph:
    b = Builder()
    shard, x = b.shard("w"), b.input("x", 4, 4)
    whole = b.gather(shard, 4, 4)
    return b.done(b.call(aten.mm.default, b.call(aten.relu.default, x), whole))


def test_each_node_that_a_pass_touches_is_named_once() -> None:
    (trace,) = runs(small(), PassSpec("swap", swap))
    assert trace.name == "swap"
    assert trace.added == ("neg_default",)
    assert trace.removed == ("relu_default",)
    assert trace.changed == ("mm_default",)
    assert trace.moved in (("gather_default",), ())  # a diff may call either of two neighbours the one that moved
    assert trace.nodes == 6


def test_the_diff_shows_the_nodes_as_lines() -> None:
    (trace,) = runs(small(), PassSpec("swap", swap))
    lines = trace.diff.splitlines()
    assert lines[:2] == ["--- before", "+++ after swap"]
    assert "-relu_default = aten.relu.default(x)  # float32[4, 4]" in lines
    assert "+neg_default = aten.neg.default(x)  # float32[4, 4]" in lines
    assert "-mm_default = aten.mm.default(relu_default, gather_default)  # float32[4, 4]" in lines
    assert "+mm_default = aten.mm.default(neg_default, gather_default)  # float32[4, 4]" in lines
    assert not any(line.startswith(("-w ", "+w ", "-x ", "+x ")) for line in lines)


def test_a_pass_that_only_reorders_has_moved_nodes() -> None:
    def behind(graph: Graph) -> Graph:
        first, second = graph.find_nodes(op="call_function", target=aten.relu.default)
        second.append(first)
        return graph

    b = Builder()
    x = b.input("x", 4)
    graph = b.done(b.call(aten.relu.default, x), b.call(aten.relu.default, x))
    (trace,) = runs(graph, PassSpec("behind", behind))
    assert (trace.added, trace.removed, trace.changed) == ((), (), ())
    assert len(trace.moved) == 1


def test_a_pass_that_does_nothing_has_no_diff() -> None:
    (trace,) = runs(small(), PassSpec("look", lambda graph: graph))
    assert (trace.diff, trace.added, trace.removed, trace.changed, trace.moved) == ("", (), (), (), ())


def test_the_time_is_that_of_the_pass_alone() -> None:
    def slow(graph: Graph) -> Graph:
        time.sleep(0.05)
        return graph

    quick, waited = runs(small(), PassSpec("look", lambda graph: graph), PassSpec("slow", slow))
    assert quick.milliseconds < 50 <= waited.milliseconds


def test_graphs_come_out_the_same_whether_watched_or_not() -> None:
    passes = default_passes(PassContext(CompileConfig(), 2))
    seen: list[PassTrace] = []
    watched, alone = run_passes(products("abc"), passes, seen.append), run_passes(products("abc"), passes)
    assert order(watched) == order(alone)
    assert [trace.name for trace in seen] == [spec.name for spec in passes]
    assert next(trace for trace in seen if trace.name == "group_gathers").removed == (
        "gather_default",
        "gather_default_1",
        "gather_default_2",
    )
