"""What tells nodes apart where a graph is cut."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from lightning_zero.compile.subgraphs.subgraph import NodeSignatures, signature
from tests.unit.compile.graphs import Builder, aten


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
