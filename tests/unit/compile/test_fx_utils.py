"""Queries of our ops in graphs, node replacement and text."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from torch.fx import Graph, GraphModule, Node

from lightning_zero.compile.fx_utils import (
    GATHER,
    NodeReplacer,
    calls,
    format_graph,
    format_nodes,
    gathers,
    is_reduce,
    is_start,
    is_view_or_cast,
    nodes_in_role,
    output_node,
    weight_nodes,
)
from lightning_zero.compile.passes.gather_groups import GroupLimits, group_gathers, use_unsharded_cache
from lightning_zero.compile.passes.prepare import fuse_casts, split_gathers
from lightning_zero.native.ops import OPS, Role, graph_overloads
from lightning_zero.planning.fake_compiler import fake_op
from tests.helpers.tracing import traced
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
    Builder()  # loads the ops
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


BF16 = torch.bfloat16


def test_all_that_read_a_node_read_its_successor() -> None:
    b = Builder()
    x = b.input("x", 2)
    one, other = b.call(aten.neg.default, x), b.call(aten.neg.default, x)
    reader = b.call(aten.add.Tensor, one, other)
    graph = b.done(one, None, reader, other, one)
    with graph.inserting_before(reader):
        new, newer = (graph.call_function(op, (x,)) for op in (aten.cos.default, aten.sin.default))
    successors = NodeReplacer(graph)
    successors.replace(one, new)
    assert reader.args == (new, other)
    assert output_node(graph).args == ((one, None, reader, other, one),)
    successors.replace(other, newer)
    successors.done()
    assert reader.args == (new, newer)
    assert output_node(graph).args == ((new, None, reader, newer, new),)
    assert one not in list(graph.nodes)
    assert other not in list(graph.nodes)
    graph.lint()


def test_what_only_replaced_nodes_read_is_erased_with_them() -> None:
    b = Builder()
    x = b.input("x", 2)
    whole = b.call(aten.neg.default, x)
    part = b.call(aten.neg.default, whole)
    graph = b.done(part)
    successors = NodeReplacer(graph)
    successors.replace(part, x)
    successors.erase(whole)
    successors.done()
    assert [node.op for node in graph.nodes] == ["placeholder", "output"]


def returned_weights(cached: bool = False, cast: bool = False) -> Graph:
    """A forward that returns five weights, as for its backward."""
    b = Builder()
    shards = [b.shard(f"primals_{number}", 8) for number in range(5)]
    memory = [b.input(f"memory_{number}", 4, 4) for number in range(5)] if cached else []
    weights = [b.gather(shard, 4, 4) for shard in shards]
    for weight, own in zip(weights, memory, strict=False):
        weight.args = (*weight.args[:3], own)
    read = [b.call(aten._to_copy.default, weight, dtype=BF16) for weight in weights] if cast else weights
    return b.done(*[b.call(aten.t.default, weight) for weight in read], *read)


@pytest.mark.parametrize(
    ("graph", "apply"),
    [
        (returned_weights(cast=True), fuse_casts),
        (returned_weights(), split_gathers),
        (returned_weights(), lambda graph: group_gathers(graph, 2, GroupLimits(1 << 10))),
        (returned_weights(cached=True), lambda graph: use_unsharded_cache(graph, GroupLimits(1 << 10))),
    ],
    ids=["casts", "waits", "views of groups", "weights that stay"],
)
def test_passes_change_the_output_once(graph: Graph, apply: Callable[[Graph], Graph]) -> None:
    module, changed = GraphModule(torch.nn.Module(), graph), list[Node]()
    module._register_replace_node_hook(lambda old, new, user: changed.append(user))
    output, before = output_node(module.graph), output_node(module.graph).args
    apply(module.graph).lint()
    assert output.args != before
    assert changed, "nothing was replaced"
    assert output not in changed


def test_a_line_tells_index_name_op_arguments_and_shape() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(3, 4, device="meta")
    both = graph.call_function(aten.var_mean.correction, (x, [1]), {"keepdim": True}, name="both")
    both.meta["val"] = aten.var_mean.correction(x.meta["val"], [1], keepdim=True)
    first = graph.call_function(operator.getitem, (both, 0), name="first")
    first.meta["val"] = both.meta["val"][0]
    graph.output((first, None))
    assert format_graph(graph).splitlines() == [
        "       x = placeholder  # float32[3, 4]",
        "    0  both = aten.var_mean.correction(x, [1], keepdim=True)  # float32[3, 1], float32[3, 1]",
        "    1  first = getitem(both, 0)  # float32[3, 1]",
        "       return (first, None)",
    ]


def test_symbolic_sizes_are_shown_by_name_and_add_no_guard() -> None:
    graph = traced(lambda x: x.exp(), torch.zeros(5, 3), mode="symbolic")
    [exp] = graph.find_nodes(op="call_function", target=aten.exp.default)
    assert f"# float32[{exp.meta['val'].shape[0]}, " in format_graph(graph)
    assert not str(exp.meta["val"].shape[0]).isdigit()
    assert not exp.meta["val"].shape[0].node.shape_env.guards


def test_a_line_without_its_number_stays_the_same_wherever_its_node_stands() -> None:
    b = Builder()
    x = b.input("x", 4)
    relu, neg = b.call(aten.relu.default, x), b.call(aten.neg.default, x)
    graph = b.done(relu, neg)
    before = dict(format_nodes(graph))
    neg.append(relu)
    after = dict(format_nodes(graph))
    assert before == after
    assert (list(before), list(after)) == (
        ["x", "relu_default", "neg_default", "output"],
        ["x", "neg_default", "relu_default", "output"],
    )
