"""Tensors of a graph, their storage, and fake buffers."""

import operator

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

from lightning_zero.compat.tensors import FakeTensorMode
from lightning_zero.profiling.graph_tensors import (
    FakeBuffer,
    is_view,
    nbytes,
    nodes_where,
    read_bytes,
    size_hint,
    storages,
    view_base,
)
from tests.helpers.tracing import traced

aten = torch.ops.aten


def node(graph: Graph, target: object) -> Node:
    [found] = graph.find_nodes(op="call_function", target=target)
    return found


def test_views_share_the_memory_of_what_they_are_views_of() -> None:
    graph = traced(lambda x: (x * 2).view(12).view(4, 3).t()[1:], torch.zeros(3, 4))
    held = storages(graph)
    made = node(graph, aten.mul.Tensor)
    views = [n for n in graph.nodes if n.op == "call_function" and n is not made]
    assert len(views) == 4
    assert all(is_view(n) for n in views)
    assert {held[n] for n in views} == {held[made]}
    assert held[made][0] is not held[made.args[0]][0]
    assert (held[made][0].name, held[made][0].nbytes, held[made][0].made) == ("mul", 48, 1)


def test_the_parts_of_a_split_share_one_memory() -> None:
    graph = traced(lambda x: x.split(2), torch.zeros(6))
    held = storages(graph)
    parts = graph.find_nodes(op="call_function", target=operator.getitem)
    assert len(parts) == 3
    assert {held[n] for n in parts} == {held[next(iter(graph.nodes))]}
    assert [nbytes(n.meta["val"]) for n in parts] == [8, 8, 8]


def test_several_results_have_a_memory_each() -> None:
    graph = traced(lambda x: torch.var_mean(x, 1), torch.zeros(3, 4, dtype=torch.float64))
    made = node(graph, aten.var_mean.correction)
    [(variance, mean)] = [storages(graph)[made]]
    assert (variance.name, variance.nbytes) == ("var_mean", 24)
    assert (mean.name, mean.nbytes) == ("var_mean[1]", 24)
    first, second = made.users
    assert storages(graph)[second][0].name == "var_mean[1]"
    assert storages(graph)[first][0].name == "var_mean"


def test_an_op_that_writes_in_place_shares_memory_but_is_no_view() -> None:
    graph = traced(lambda x, y: x.copy_(y), torch.zeros(4), torch.ones(4))
    written = node(graph, aten.copy_.default)
    assert view_base(written) is next(iter(graph.nodes))
    assert not is_view(written)


def test_waiting_for_a_collective_allocates_nothing() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    wait = graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (x,))
    x.meta["val"] = wait.meta["val"] = torch.empty(5, device="meta")
    assert is_view(wait)
    held = storages(graph)
    assert held[wait] == held[x]


def test_an_expanded_tensor_is_read_once() -> None:
    graph = traced(lambda x: x.expand(1000, 4) + 1, torch.zeros(4))
    expanded = node(graph, aten.expand.default)
    assert nbytes(expanded.meta["val"]) == 16000
    assert read_bytes(expanded, storages(graph)[expanded][0]) == 16


def test_symbolic_sizes_count_as_seen_and_add_no_guard() -> None:
    module = make_fx(lambda x: torch.cat([x, x]), tracing_mode="symbolic")(torch.zeros(5, 3))
    made = node(module.graph, aten.cat.default)
    assert isinstance(made.meta["val"].shape[0], torch.SymInt)
    assert nbytes(made.meta["val"]) == 2 * 5 * 3 * 4
    assert size_hint(made.meta["val"].shape[0]) == 10
    assert not made.meta["val"].shape[0].node.shape_env.guards


def test_a_size_that_is_not_known_has_a_guess() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    environment = ShapeEnv()
    with FakeTensorMode(shape_env=environment):
        size = environment.create_unbacked_symint()
        assert size_hint(size) > 0
        assert size_hint(size * 2) > 0
    assert not environment.guards


def test_an_op_of_torch_is_asked_for_once_and_others_for_each_node() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    products = [graph.call_function(aten.mm.default, (x, x)) for _ in range(2)]
    parts = [graph.call_function(operator.getitem, (product, 0)) for product in products]
    asked: list[Node] = []

    def ask(node: Node) -> bool:
        asked.append(node)
        return node is not parts[1]

    assert nodes_where([x, *products, *parts], ask) == {*products, parts[0]}
    assert asked == [products[0], *parts]


fake = FakeTensorMode()


def described(value: Tensor) -> tuple[object, ...]:
    return type(value), value.dtype, value.device, value.shape, value.stride(), value.storage_offset()


@pytest.mark.parametrize("shape", [[24], [2, 3, 4], [6, 1, 4], [0, 3], [4, 0, 2], []], ids=str)
@pytest.mark.parametrize("like", ["fake", "meta"])
def test_a_part_is_a_view_of_a_slice(shape: list[int], like: str) -> None:
    with fake:
        value = torch.empty(2, dtype=torch.bfloat16) if like == "fake" else None
    value = torch.empty(2, dtype=torch.bfloat16, device="meta") if value is None else value
    numel = torch.Size(shape).numel()
    whole = value.new_empty(40)
    memory = FakeBuffer(value, 40)
    assert described(memory.part(5, shape)) == described(whole[5 : 5 + numel].view(shape))


def test_parts_lie_in_one_memory_inside_a_mode_or_not() -> None:
    with fake:
        value = torch.empty(2)
        memory = FakeBuffer(value, 40)
        parts = [memory.part(0, [40]), memory.part(8, [4, 2])]
    parts.append(memory.part(16, [4]))
    assert len({part.untyped_storage()._cdata for part in parts}) == 1
    assert parts[1].fake_mode is fake
    with fake:
        assert (parts[1] + parts[2][:2]).shape == (4, 2)
