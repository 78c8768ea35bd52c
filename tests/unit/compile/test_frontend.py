"""What is read off graphs as Dynamo made them."""

import operator

import pytest
import torch
import torch.distributed._functional_collectives as collectives
from torch import nn
from torch.fx import Graph, GraphModule

from lightning_zero.compile.frontend import has_collectives


def module_of(*targets: object, nested: nn.Module | None = None) -> GraphModule:
    graph = Graph()
    value = graph.placeholder("x")
    for target in targets:
        value = graph.call_function(target, (value,))  # type: ignore[arg-type]
    if nested is not None:
        value = graph.call_module("nested", (value,))
    graph.output((value,))
    root = nn.Module()
    if nested is not None:
        root.nested = nested
    return GraphModule(root, graph)


@pytest.mark.parametrize(
    "target",
    [torch.ops._c10d_functional.all_reduce.default, torch.ops._c10d_functional.all_reduce, collectives.all_reduce],
)
def test_collectives_in_a_graph_are_seen(target: object) -> None:
    assert has_collectives(module_of(torch.relu, target))
    assert has_collectives(module_of(torch.relu, nested=module_of(target)))


def test_our_own_ops_and_everything_else_are_none() -> None:
    own = torch.nn.functional.relu
    assert not has_collectives(module_of(own, operator.neg, torch.ops.aten.relu.default, nested=module_of(torch.sin)))
