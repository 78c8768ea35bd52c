"""A part of a graph as a graph of its own: inputs, own views, symbols and signatures."""

from __future__ import annotations

import itertools
import operator

import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from lightning_zero.compile.subgraphs.node_kinds import NodeKind, classify_nodes
from lightning_zero.compile.subgraphs.subgraph import NodeSignatures, Subgraph, make_subgraph, signature, symbol_inputs
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
    """Inductor writes the formula into the code of the subgraph instead of the given number."""
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


def test_signatures_tell_ops_constants_sizes_and_strides() -> None:
    b = Builder()
    x, y = b.input("x", 4, 4), b.input("y", 4, 4)
    turned, long = b.call(aten.t.default, x), b.input("long", 8, 4)
    half = b.input("half", 4, 4, dtype=torch.float16)
    same = b.call(aten.add.Tensor, x, y)
    assert signature(same) == signature(b.call(aten.add.Tensor, y, x))
    others = [
        b.call(aten.mul.Tensor, x, y),
        b.call(aten.add.Tensor, x, y, alpha=2),
        b.call(aten.add.Tensor, x, 3.0),
        b.call(aten.add.Tensor, turned, turned),
        b.call(aten.add.Tensor, long, long),
        b.call(aten.add.Tensor, half, half),
    ]
    assert len({signature(same), *map(signature, others)}) == 7


def test_numbers_are_equal_only_where_python_writes_them_alike() -> None:
    b = Builder()
    x = b.input("x", 4)
    nodes = [b.call(aten.add.Tensor, x, number) for number in (1, 1.0, True, 0.0, -0.0)]
    assert len(set(map(signature, nodes))) == 5


def test_a_signature_is_found_once() -> None:
    b = Builder()
    x = b.input("x", 4)
    node, seen = b.call(aten.neg.default, x), NodeSignatures()
    assert seen[node] is seen[node]


def test_with_a_signature_what_is_read_tells_arguments() -> None:
    b = Builder()
    x, y = b.input("x", 4), b.input("y", 4)
    ways = [(x, y, x), (x, y, y), (y, x, x), (x, x, x), (x, x, y)]
    nodes = [b.call(aten.addcmul.default, *way) for way in ways]
    seen = NodeSignatures()
    assert len({seen[node] for node in nodes}) == 1
    assert len({seen.reads(node, {x: 0, y: 1}) for node in nodes}) == 5


def test_values_are_told_by_where_in_memory_they_begin() -> None:
    b = Builder()
    x = b.input("x", 64)

    def value(begin: int) -> object:
        return NodeSignatures().value(b.call(aten.slice.Tensor, x, 0, begin, begin + 4), _number)

    assert value(0) == value(4) == value(8)
    assert value(0) != value(1)


def test_symbols_of_equal_names_are_others_where_they_belong_to_other_traces() -> None:
    def dynamic() -> Node:
        mode = FakeTensorMode(shape_env=ShapeEnv())
        context = StatelessSymbolicContext([DimDynamic.DYNAMIC])
        b = Builder()
        x = b.graph.placeholder("x")
        x.meta["val"] = mode.from_tensor(torch.empty(7), symbolic_context=context)
        return x

    numbers: dict[object, int] = {}

    def number(thing: object) -> int:
        return numbers.setdefault(thing, len(numbers))

    one, other = dynamic(), dynamic()
    assert NodeSignatures().value(one, number) == NodeSignatures().value(one, number)
    assert NodeSignatures().value(one, number) != NodeSignatures().value(other, number)


def _number(thing: object) -> int:
    raise AssertionError(f"nothing here is told by {thing}")
