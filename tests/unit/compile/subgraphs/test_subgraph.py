"""A part of a graph as a graph of its own: what it reads, what it makes for itself, and what gives sizes their values."""

from __future__ import annotations

import itertools
import operator

import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from lightning_zero.compile.subgraphs.node_kinds import NodeKind, classify_nodes
from lightning_zero.compile.subgraphs.subgraph import Subgraph, make_subgraph, symbol_inputs
from tests.unit.compile.graphs import Builder, aten


def targets(subgraph: Subgraph) -> list[str]:
    return [node.name if node.op in ("placeholder", "output") else str(node.target) for node in subgraph.graph.nodes]


def test_views_and_constants_are_made_once_in_each_piece_that_reads_them() -> None:
    b = Builder()
    x, w, unread = b.input("x", 2, 3), b.input("w", 2, 2), b.input("unread", 2)
    flat = b.call(aten.view.default, x, [6])
    view = b.call(aten.view.default, flat, [3, 2])
    one = b.call(aten.full.default, [3, 2], 1.0, device=torch.device("meta"))
    product = b.call(aten.mm.default, view, w)
    before = b.call(aten.add.Tensor, product, unread)
    inner = b.call(aten.mul.Tensor, before, one)
    last = b.call(aten.add.Tensor, inner, view)
    turned = b.call(aten.t.default, last)
    graph = b.done(turned, inner)
    subgraph = make_subgraph([inner, last], [turned, inner], classify_nodes(graph), [])
    assert subgraph.inputs == (before, x)
    assert subgraph.outputs == (inner, turned)
    assert targets(subgraph) == [
        *("add_tensor", "x", "aten.full.default", "aten.mul.Tensor", "aten.view.default", "aten.view.default"),
        *("aten.add.Tensor", "aten.t.default", "output"),
    ]
    [output] = subgraph.graph.find_nodes(op="output")
    assert [value.shape for value in output.meta["val"]] == [(3, 2), (2, 3)]
    assert [node.meta["val"].shape for node in subgraph.graph.find_nodes(op="placeholder")] == [(3, 2), (2, 3)]
    subgraph.graph.lint()
    known = {"add_tensor": torch.randn(3, 2), "x": torch.randn(2, 3)}
    module = torch.fx.GraphModule(torch.nn.Module(), subgraph.graph)
    for node in module.graph.find_nodes(op="call_function", target=aten.full.default):
        node.kwargs = {}
    module.recompile()
    found = module(*known.values())
    assert found[0].equal(known["add_tensor"])
    assert found[1].equal((known["add_tensor"] + known["x"].view(3, 2)).t())


def test_a_piece_is_given_the_sizes_that_it_uses_and_no_others() -> None:
    b, sizes = Builder(), FakeTensorMode(shape_env=ShapeEnv())

    def dynamic(name: str, rows: int) -> tuple[torch.fx.Node, torch.fx.Node]:
        dynamic_rows = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
        value = sizes.from_tensor(torch.empty(rows, 4), symbolic_context=dynamic_rows)
        size, node = b.graph.placeholder(f"rows_of_{name}"), b.graph.placeholder(name)
        size.meta["val"], node.meta["val"] = value.shape[0], value
        return size, node

    rows, x = dynamic("x", 7)
    _, y = dynamic("y", 9)
    b.graph.placeholder("as_long_as_x").meta["val"] = x.meta["val"]
    fixed = b.input("fixed", 4)
    number = b.graph.placeholder("number")
    number.meta["val"] = 3
    sines = []
    for read in (x, y, fixed):
        sines.append(b.graph.call_function(aten.sin.default, (read,)))
        sines[-1].meta["val"] = read.meta["val"]
    graph = b.done(*sines)
    kinds = classify_nodes(graph)
    assert make_subgraph(sines[:1], sines[:1], kinds, symbol_inputs(graph)).inputs == (x, rows)
    assert make_subgraph(sines[2:], sines[2:], kinds, symbol_inputs(graph)).inputs == (fixed,)
    assert make_subgraph([], [], kinds, symbol_inputs(graph)).inputs == ()


def test_a_piece_that_reads_a_number_is_given_the_symbols_of_its_formula() -> None:
    """Inductor writes the formula into the code of the piece, and not the number that the piece is given."""
    b, sizes = Builder(), ShapeEnv()
    source = ConstantSource("counter")
    counter = b.graph.placeholder("counter")
    counter.meta["val"] = sizes.create_symintnode(sizes.create_symbol(5, source), hint=5, source=source)
    factor = b.graph.call_function(operator.add, (counter, 1))
    factor.meta["val"] = counter.meta["val"] + 1
    x = b.input("x", 4)
    scaled = b.graph.call_function(aten.mul.Tensor, (x, factor))
    scaled.meta["val"] = x.meta["val"]
    graph = b.done(scaled)
    kinds = classify_nodes(graph) | {factor: NodeKind.COMM}
    assert make_subgraph([scaled], [scaled], kinds, symbol_inputs(graph)).inputs == (x, factor, counter)


def test_a_size_that_is_read_itself_is_given_once() -> None:
    b = Builder()
    x, two = b.input("x", 4), b.graph.placeholder("two")
    two.meta["val"] = 2
    scaled = b.graph.call_function(aten.mul.Tensor, (x, two))
    scaled.meta["val"] = x.meta["val"]
    parts = b.call(aten.split.Tensor, scaled, 2)
    part = b.graph.call_function(operator.getitem, (parts, 0))
    part.meta["val"] = parts.meta["val"][0]
    graph = b.done(part)
    assert make_subgraph([scaled], [part], classify_nodes(graph), symbol_inputs(graph)).inputs == (x, two)


def test_in_what_order_others_read_a_piece_makes_it_no_other() -> None:
    b = Builder()
    x = b.input("x", 2, 3)
    first = b.call(aten.sin.default, x)
    last = b.call(aten.cos.default, first)
    flat = b.call(aten.view.default, first, [6])
    turned = b.call(aten.t.default, last)
    narrow = b.call(aten.view.default, first, [3, 2])
    graph = b.done(first, last, flat, turned, narrow)
    kinds = classify_nodes(graph)
    made = {
        make_subgraph([first, last], wanted, kinds, []).outputs
        for wanted in itertools.permutations([first, last, flat, turned, narrow])
    }
    assert made == {(first, narrow, flat, last, turned)}
