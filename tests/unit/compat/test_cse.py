"""A joint graph whose equal nodes are merged where they are, against torch's copy of it without them."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._functorch import compile_utils, partitioners
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from lightning_zero.compat.cse import cse_in_place


def repeated(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    one, other = (x.sin() @ y).cos(), (x.sin() @ y).cos()
    return one + other, (x * 2).sum(0, keepdim=True), (x * 2.0).sum(0, keepdim=False)


def drawn(x: Tensor, y: Tensor) -> Tensor:
    parts = [nn.functional.dropout(x, 0.5) for _ in range(2)] + [torch.empty(2, 2), torch.empty(2, 2)]
    return torch.stack([part.sum() for part in parts]).sum() + (torch.rand_like(x) - torch.rand_like(x) @ y).sum()


def written(x: Tensor, y: Tensor) -> Tensor:
    before, buffer = x.sin(), y.clone()
    first = buffer.cos()
    buffer.add_(x)
    return before + x.sin() + first + buffer.cos() + buffer.cos()


def returned(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return x.exp(), x.exp(), x.exp() * y, x.t(), x.t()


def parts(x: Tensor, y: Tensor) -> Tensor:
    pairs = [torch.var_mean(x, [1]) for _ in range(2)]
    return sum((mean * y + var for var, mean in pairs), y.new_zeros(()))


def traced(function: Callable[..., Any]) -> GraphModule:
    return make_fx(function, tracing_mode="fake")(torch.randn(3, 3), torch.randn(3, 3))


def described(graph: Graph) -> list[tuple[Any, ...]]:
    return [
        (node.op, node.name, node.target, str(node.args), str(node.kwargs), sorted(map(str, node.meta)))
        for node in graph.nodes
    ]


@pytest.mark.parametrize("function", [repeated, drawn, written, returned, parts])
def test_the_same_is_left_as_of_the_copy(function: Callable[..., Any]) -> None:
    module = traced(function)
    expected = described(compile_utils.fx_graph_cse(deepcopy(module.graph)))
    nodes = list(module.graph.nodes)
    with cse_in_place():
        merged = partitioners.fx_graph_cse(module.graph)
    assert merged is module.graph
    assert set(merged.nodes) <= set(nodes)
    assert described(merged) == expected
    merged.lint()


def test_something_is_merged_and_something_is_not() -> None:
    counts = {}
    for function in (repeated, drawn, returned):
        module = traced(function)
        counts[function.__name__] = len(module.graph.nodes)
        with cse_in_place():
            counts[function.__name__] -= len(partitioners.fx_graph_cse(module.graph).nodes)
    assert counts["repeated"] >= 3
    assert counts["drawn"] == 0
    assert counts["returned"] == 0, "whoever gets two tensors may write into one of them"


NUMBERS = (0.0, -0.0, 0, False, 1, 1.0, True, 0j, complex(0.0, -0.0))


def test_numbers_that_python_calls_equal_are_not() -> None:
    """Torch takes 0.0 for -0.0, and a graph would divide by the wrong one."""
    graph = Graph()
    x = graph.placeholder("x")
    made = [graph.call_function(torch.ops.aten.div.Tensor, (x, by)) for by in (*NUMBERS, 1)]
    graph.output(tuple(made))
    with cse_in_place():
        partitioners.fx_graph_cse(graph)
    left = graph.find_nodes(op="call_function", target=torch.ops.aten.div.Tensor)
    assert [repr(node.args[1]) for node in left] == list(map(repr, NUMBERS))
    results = graph.output_node().args[0]
    assert isinstance(results, tuple)
    assert results[-1] is results[4]


def test_torch_has_its_own_function_back() -> None:
    before = partitioners.fx_graph_cse
    with pytest.raises(ZeroDivisionError), cse_in_place():
        raise ZeroDivisionError
    assert partitioners.fx_graph_cse is before
