"""Our ops in graphs, which are asked for them by what their nodes call."""

from __future__ import annotations

import torch

from lightning_zero.compile.fx_utils import (
    GATHER,
    calls,
    gathers,
    is_reduce,
    is_start,
    is_view_or_cast,
    nodes_in_role,
    weight_nodes,
)
from lightning_zero.native.ops import OPS, Role, graph_overloads
from lightning_zero.planning.fake_compiler import fake_op
from tests.unit.compile.graphs import Builder, aten
from tests.unit.compile.subgraphs.graphs import layers


def test_gathers_are_found_in_order_those_on_paper_among_them() -> None:
    b = Builder()
    shards = [b.shard(name) for name in "abc"]
    first, last = b.gather(shards[0], 4, 4), b.gather(shards[2], 4, 4)
    with b.graph.inserting_before(last):
        paper = b.graph.call_function(fake_op("gather"), (shards[1], [4, 4], torch.float32))
    paper.meta["val"] = first.meta["val"]
    graph = b.done(b.call(aten.addmm.default, first, paper, last))
    assert gathers(graph) == [first, paper, last]
    last.append(first)
    assert gathers(graph) == [paper, last, first] == [node for node in graph.nodes if calls(node, GATHER)]


def test_ops_are_found_by_what_they_do() -> None:
    graph = layers(4, at=1, grads=True)
    starts, handed = ([node for node in graph.nodes if asked(node)] for asked in (is_start, is_reduce))
    assert nodes_in_role(graph, Role.START) == starts
    assert nodes_in_role(graph, Role.REDUCE) == handed
    both = {*starts, *handed}
    assert nodes_in_role(graph, Role.START, Role.REDUCE) == [node for node in graph.nodes if node in both]
    assert starts
    assert handed


def test_an_op_without_a_form_on_paper_has_its_own_alone() -> None:
    Builder()  # loads them
    assert graph_overloads(OPS["gather_group"]) == [OPS["gather_group"].overload]
    assert graph_overloads(OPS[GATHER]) == [OPS[GATHER].overload, fake_op("gather")]


def test_weights_are_gathers_and_what_has_their_values_in_any_form() -> None:
    b = Builder()
    shard, x = b.shard("w"), b.input("x", 4, 4)
    gather = b.gather(shard, 4, 4)
    turned = b.call(aten.t.default, gather)
    narrow = b.call(torch.ops.prims.convert_element_type.default, turned, torch.bfloat16)
    product, view = b.call(aten.mm.default, x, turned), b.call(aten.t.default, x)
    graph = b.done(b.call(aten.t.default, product), narrow, view)
    assert weight_nodes(graph) == {gather, turned, narrow}
    assert is_view_or_cast(view)
