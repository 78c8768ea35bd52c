"""What is noted of tensors' strides is what they have, whatever Inductor's passes have changed before."""

from __future__ import annotations

from operator import getitem
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

from lightning_zero.compile.subgraphs.compile_subgraphs import StrideMismatch, check_strides, fix_strides
from lightning_zero.compile.subgraphs.subgraph import Subgraph
from lightning_zero.compile.subgraphs.subgraph_program import SubgraphProgram, compile_subgraph

aten = torch.ops.aten
NARROW, WIDE = 13, 16


def padded(fake: FakeTensorMode) -> tuple[Graph, list[Tensor]]:
    """A product that has been made wider, cut narrow again, and what was noted before that of those who read it."""
    with fake:
        given = [torch.empty(8, 5), torch.empty(5, WIDE)]
    graph = Graph()
    placeholders = [graph.placeholder(name) for name in "ab"]
    for node, value in zip(placeholders, given, strict=True):
        node.meta["val"] = value
    nodes: list[Node] = []

    def add(target: Any, *args: Any, stale: tuple[int, ...] = ()) -> Node:
        node = graph.call_function(target, args)
        values = [arg.meta["val"] if isinstance(arg, Node) else arg for arg in args]
        node.meta["val"] = target(*values)
        if stale:
            with fake:
                node.meta["val"] = torch.empty(stale)
        nodes.append(node)
        return node

    narrow = add(aten.slice.Tensor, add(aten.mm.default, *placeholders), 1, 0, NARROW)
    split = add(aten.view.default, narrow, [4, 2, NARROW], stale=(4, 2, NARROW))
    row = add(aten.select.int, split, 0, 1, stale=(2, NARROW))
    made = add(aten.sin.default, split, stale=(4, 2, NARROW))
    flat = graph.call_function(aten.view.default, (narrow, [8 * NARROW]))  # was one before the product was padded
    with fake:
        flat.meta["val"] = torch.empty(8 * NARROW)
    graph.output((split, row, made, flat))
    return graph, given


def test_views_of_a_padded_product_are_noted_as_they_are() -> None:
    graph, given = padded(FakeTensorMode())
    fix_strides(graph, given)
    (outputs,) = graph.output_node().args
    assert isinstance(outputs, tuple)
    split, row, made, flat = outputs
    assert split.meta["val"].stride() == (2 * WIDE, WIDE, 1)
    assert row.meta["val"].stride() == (WIDE, 1)
    assert made.meta["val"].stride() == (2 * NARROW, NARROW, 1)  # new memory has no gaps
    assert flat.target is aten.reshape.default, "nothing of that shape lies there"
    assert flat.meta["val"].stride() == (1,)


def test_inputs_have_the_strides_they_come_with() -> None:
    fake = FakeTensorMode()
    graph, given = padded(fake)
    with fake:
        given[0] = torch.empty(5, 8).t()
    fix_strides(graph, given)
    assert next(iter(graph.nodes)).meta["val"].stride() == (1, 8)


def test_what_forward_hands_to_backward_is_told_as_it_is_and_comes_as_told() -> None:
    fake = FakeTensorMode()
    graph, given = padded(fake)
    fix_strides(graph, given)
    inputs = tuple(graph.find_nodes(op="placeholder"))
    (outputs,) = graph.output_node().args
    assert isinstance(outputs, tuple)
    compiled = compile_subgraph(GraphModule({}, graph), given, {"is_backward": False})
    check_strides(compiled, [node.meta["val"] for node in outputs])
    context = TracingContext(None)
    context.output_strides = []
    with tracing(context):
        program = SubgraphProgram(GraphModule({}, graph), [Subgraph(inputs, (), outputs)], [compiled])
    told = [(2 * WIDE, WIDE, 1), (WIDE, 1), (2 * NARROW, NARROW, 1), (1,)]
    assert context.output_strides == told
    a, b = torch.randn(8, 5), torch.randn(5, WIDE)
    results = program([a, b])
    assert [result.stride() for result in results] == told
    torch.testing.assert_close(results[0], (a @ b)[:, :NARROW].reshape(4, 2, NARROW))


def test_a_piece_whose_results_lie_otherwise_is_not_used() -> None:
    value = torch.empty(4, 1, 3)
    check_strides(
        SimpleNamespace(output_strides=[("3", "99", "1")]), [value]
    )  # nothing follows a stride of one element
    check_strides(SimpleNamespace(output_strides=[("3*s0", "3", "1")]), [value])
    check_strides(SimpleNamespace(output_strides=None), [value])
    with pytest.raises(StrideMismatch):
        check_strides(SimpleNamespace(output_strides=[("8*s0", "3", "2")]), [value])
    with pytest.raises(StrideMismatch, match=r"\['8', '1'\].*\['3', '1'\]"):
        check_strides(SimpleNamespace(output_strides=[("8", "3", "1")]), [value])


def test_equal_views_of_equal_layers_are_each_noted_as_they_are() -> None:
    fake = FakeTensorMode()
    with fake:
        value, other = torch.empty(4, 6), torch.empty(4, 6)
    graph = Graph()
    x = graph.placeholder("x")
    x.meta["val"] = value
    views = [graph.call_function(aten.t.default, (x,)) for _ in range(3)]
    split = graph.call_function(aten.split.Tensor, (x, 2, 1))
    parts = [graph.call_function(getitem, (split, at)) for at in range(3)]
    graph.output((*views, *parts))
    for node in views:
        node.meta["val"] = value.t()
    views[1].meta["val"] = other.t().contiguous()  # noted wrong amid two that are right
    split.meta["val"] = value.split(2, 1)
    for at, node in enumerate(parts):
        node.meta["val"] = split.meta["val"][at] if at != 1 else other[:, :2].contiguous()
    fix_strides(graph, [value])
    assert [node.meta["val"].stride() for node in views] == [(1, 6)] * 3
    assert [node.meta["val"].stride() for node in parts] == [(6, 1)] * 3
