"""Graphs as text, for reports and diffs."""

import operator

import torch
from torch.fx import Graph

from lightning_zero.compile.fx_utils import format_graph, format_nodes
from tests.helpers.tracing import traced
from tests.unit.compile.graphs import Builder

aten = torch.ops.aten


def test_a_line_tells_index_name_op_arguments_and_shape() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(3, 4, device="meta")
    both = graph.call_function(aten.var_mean.correction, (x, [1]), {"keepdim": True}, name="both")
    both.meta["val"] = aten.var_mean.correction(x.meta["val"], [1], keepdim=True)
    first = graph.call_function(operator.getitem, (both, 0), name="first")
    first.meta["val"] = both.meta["val"][0]
    graph.output((first, None))
    assert format_graph(graph).splitlines() == [
        "       x = placeholder  # float32[3, 4]",
        "    0  both = aten.var_mean.correction(x, [1], keepdim=True)  # float32[3, 1], float32[3, 1]",
        "    1  first = getitem(both, 0)  # float32[3, 1]",
        "       return (first, None)",
    ]


def test_symbolic_sizes_are_shown_by_name_and_add_no_guard() -> None:
    graph = traced(lambda x: x.exp(), torch.zeros(5, 3), mode="symbolic")
    [exp] = graph.find_nodes(op="call_function", target=aten.exp.default)
    assert f"# float32[{exp.meta['val'].shape[0]}, " in format_graph(graph)
    assert not str(exp.meta["val"].shape[0]).isdigit()
    assert not exp.meta["val"].shape[0].node.shape_env.guards


def test_a_line_without_its_number_stays_the_same_wherever_its_node_stands() -> None:
    b = Builder()
    x = b.input("x", 4)
    relu, neg = b.call(aten.relu.default, x), b.call(aten.neg.default, x)
    graph = b.done(relu, neg)
    before = dict(format_nodes(graph))
    neg.append(relu)
    after = dict(format_nodes(graph))
    assert before == after
    assert (list(before), list(after)) == (
        ["x", "relu_default", "neg_default", "output"],
        ["x", "neg_default", "relu_default", "output"],
    )
