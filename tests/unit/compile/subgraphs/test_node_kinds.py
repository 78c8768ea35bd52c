"""Kinds of nodes in a graph that is cut."""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from lightning_zero.compat.tensors import wait_tensor
from lightning_zero.compile.fx_utils import is_start
from lightning_zero.compile.subgraphs.node_kinds import (
    NodeKind,
    all_read,
    classify_nodes,
    is_kernel,
    is_pointwise,
    readers,
    reads,
)
from lightning_zero.compile.subgraphs.subgraph import signature
from tests.unit.compile.graphs import Builder, aten
from tests.unit.compile.subgraphs.graphs import layers


def test_our_ops_and_what_cuts_weights_out_of_a_group_run_between_pieces() -> None:
    graph = layers(2)
    kinds = classify_nodes(graph)
    start = next(node for node in graph.nodes if is_start(node))
    ours = [start, *start.users]
    ours += [user for node in ours for user in node.users]
    assert {str(node.target) for node in ours[1:]} >= {str(wait_tensor), "aten.slice.Tensor"}
    assert all(kinds[node] is NodeKind.COMM for node in ours)
    for node in graph.nodes:
        if node.target is aten.view.default:
            assert kinds[node] is NodeKind.COMM
            with graph.inserting_after(node):
                turned = graph.call_function(aten.t.default, (node,))
            turned.meta["val"] = node.meta["val"].t()
    assert {kind for node, kind in classify_nodes(graph).items() if node.target is aten.t.default} == {NodeKind.VIEW}


def test_sizes_run_between_unless_work_makes_them() -> None:
    b = Builder()
    x = b.input("x", 4)

    def scalar(op: object, *args: object) -> Node:
        node = b.graph.call_function(op, args)  # type: ignore[arg-type]
        node.meta["val"] = 4
        return node

    size = scalar(aten.sym_size.int, x, 0)
    doubled = scalar(operator.mul, size, 2)
    item = scalar(aten._local_scalar_dense.default, b.call(aten.sum.default, x))
    beyond = scalar(operator.add, item, 1)
    view = b.call(aten.view.default, x, [2, 2])
    of_view = scalar(aten.sym_size.int, view, 0)
    kinds = classify_nodes(b.done(doubled, item, beyond, of_view))
    assert [kinds[node] for node in (size, doubled)] == [NodeKind.COMM] * 2
    assert [kinds[node] for node in (item, beyond, of_view)] == [NodeKind.COMPUTE] * 3


def test_constants_parts_of_results_and_bodies_go_with_what_reads_or_makes_them() -> None:
    b = Builder()
    x = b.input("x", 4)
    weight, body = b.graph.get_attr("weight"), b.graph.get_attr("body")
    weight.meta["val"] = torch.empty(4, device="meta")
    maximum = b.call(aten.max.dim, x, 0)
    part = b.graph.call_function(operator.getitem, (maximum, 0))
    part.meta["val"] = maximum.meta["val"][0]
    chunks = b.call(aten.split.Tensor, x, 2)
    chunk = b.graph.call_function(operator.getitem, (chunks, 0))
    chunk.meta["val"] = chunks.meta["val"][0]
    waited = b.graph.call_function(wait_tensor, (x,))
    waited.meta["val"] = x.meta["val"]
    kinds = classify_nodes(b.done(part, chunk, waited))
    assert [kinds[weight], kinds[body]] == [NodeKind.INPUT, NodeKind.VIEW]
    assert [kinds[maximum], kinds[part]] == [NodeKind.COMPUTE] * 2
    assert [kinds[chunks], kinds[chunk]] == [NodeKind.VIEW] * 2
    assert kinds[waited] is NodeKind.COMPUTE, "users' own"


def test_what_is_written_to_memory_by_itself_and_what_is_not() -> None:
    b = Builder()
    x = b.input("x", 4, 4)
    product, sine = b.call(aten.mm.default, x, x), b.call(aten.sin.default, x)
    total = b.call(aten.sum.default, x)
    part = b.graph.call_function(operator.getitem, (product, 0))
    other = b.graph.call_function(operator.getitem, (sine, 0))
    assert [is_kernel(node) for node in (product, part, sine, other, x)] == [True, True, False, False, False]
    assert [is_pointwise(node) for node in (sine, total, product, part)] == [True, False, False, False]


def test_random_numbers_that_are_drawn_again_are_drawn_where_they_were_and_by_equal_layers_alike() -> None:
    """torch runs recomputed random ops by another op, with a generator state of their own."""

    def again(op: object, *args: object, rng_state: object = None) -> None: ...

    b = Builder()
    x = b.input("x", 1, 2, 8, 4)
    attention = aten._scaled_dot_product_efficient_attention.default
    found, drawn = [], []
    for number in range(2):
        state = b.graph.placeholder(f"state_{number}")
        state.meta["val"] = torch.Generator()
        node = b.graph.call_function(again, (attention, x, x, x, None, False, 0.1), {"rng_state": state})
        node.meta["val"] = (x.meta["val"],) * 4
        part = b.graph.call_function(operator.getitem, (node, 0))
        part.meta["val"] = x.meta["val"]
        found.append(part)
        node = b.graph.call_function(again, (aten.rand.default, [4]), {"rng_state": state})
        node.meta["val"] = torch.empty(4, device="meta")
        drawn.append(node)
    kinds = classify_nodes(b.done(*found, *drawn))
    for nodes in (found, [part.args[0] for part in found], drawn):
        assert {kinds[node] for node in nodes} == {NodeKind.COMPUTE}
        assert len({signature(node) for node in nodes}) == 1
    assert all(is_kernel(node) for node in found)
    assert not any(is_kernel(node) for node in drawn)


def test_what_nodes_read_and_who_reads_them_through_views_is_found_for_all_at_once() -> None:
    graph = layers(3)
    kinds = classify_nodes(graph)
    read, behind = reads(graph, kinds), readers(graph, kinds)
    for node in graph.nodes:
        assert read[node] == list(all_read(node, kinds))
        for other in graph.nodes:
            if kinds[node] is not NodeKind.VIEW and kinds[other] is not NodeKind.VIEW:
                assert (other in behind[node]) == (node in read[other])
