"""The generated code that runs subgraphs, and when it releases their inputs."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

from lightning_zero.compile.subgraphs.subgraph import Subgraph
from lightning_zero.compile.subgraphs.subgraph_program import SubgraphProgram

aten = torch.ops.aten


def two_pieces() -> tuple[GraphModule, list[Any]]:
    """y = first(x); z = y + c; second(y, z), where c is a constant of the module."""
    graph = Graph()
    x, unread = graph.placeholder("x"), graph.placeholder("unread")
    constant = graph.get_attr("constant")
    y = graph.call_function(aten.neg.default, (x,))
    z = graph.call_function(aten.add.Tensor, (y, constant), {"alpha": 2})
    last = graph.call_function(aten.mul.Tensor, (y, z))
    graph.output((last, None, y))
    root = torch.nn.Module()
    root.register_buffer("constant", torch.tensor(3.0))
    assert unread is not None
    return GraphModule(root, graph), [Subgraph((x,), (y,), (y,)), z, Subgraph((y, z), (last,), (last,))]


def test_calls_pieces_and_ops_in_order() -> None:
    module, steps = two_pieces()

    def second(inputs: list[Tensor]) -> list[Tensor]:
        y, z = inputs
        return [y * z]

    program = SubgraphProgram(module, steps, [lambda inputs: [-inputs[0]], second])
    given = [torch.tensor(2.0), torch.tensor(9.0)]
    assert [value if value is None else value.item() for value in program(given)] == [-8.0, None, -2.0]
    assert given == []
    assert program.calls == 2
    assert program._boxed_call


def test_lets_go_of_a_value_before_its_last_reader_begins() -> None:
    module, steps = two_pieces()
    gone: list[bool] = []
    seen: list[weakref.ref[Tensor]] = []

    def first(inputs: list[Tensor]) -> list[Tensor]:
        seen.append(weakref.ref(inputs[0]))
        result = -inputs[0]
        inputs.clear()
        gone.append(seen[0]() is None)
        return [result]

    def second(inputs: list[Tensor]) -> list[Tensor]:
        y, z = inputs
        seen.append(weakref.ref(z))
        result = y * z
        del z
        inputs.clear()
        gone.append(seen[1]() is None)
        return [result]

    SubgraphProgram(module, steps, [first, second])([torch.tensor(2.0), torch.tensor(9.0)])
    assert gone == [True, True]


def test_draws_the_seeds_that_a_whole_graph_would_draw() -> None:
    graph = Graph()
    seeds = graph.call_function(torch.ops.prims.inductor_seeds.default, (3, torch.device("cpu")))
    graph.output((seeds,))
    program = SubgraphProgram(GraphModule(torch.nn.Module(), graph), [seeds], [])
    torch.manual_seed(7)
    [drawn] = program([])
    torch.manual_seed(7)
    expected = torch.empty(3, dtype=torch.int64)
    aten.randint.low_out(-(2**63), 2**63 - 1, [3], out=expected)  # as Inductor's code does
    assert torch.equal(drawn, expected)
    assert "constant" in program.code
