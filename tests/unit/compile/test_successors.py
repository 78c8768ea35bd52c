"""Nodes in the place of others."""

from collections.abc import Callable

import pytest
import torch
from torch.fx import Graph, GraphModule, Node

from lightning_zero.compile.fx_utils import NodeReplacer, output_node
from lightning_zero.compile.passes.gather_groups import GroupLimits, group_gathers, use_resident
from lightning_zero.compile.passes.prepare import fuse_casts, split_gathers
from tests.unit.compile.graphs import Builder, aten

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


def returned_weights(resident: bool = False, cast: bool = False) -> Graph:
    """A forward that returns five weights, as it does for its backward."""
    b = Builder()
    shards = [b.shard(f"primals_{number}", 8) for number in range(5)]
    memory = [b.input(f"memory_{number}", 4, 4) for number in range(5)] if resident else []
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
        (returned_weights(resident=True), lambda graph: use_resident(graph, GroupLimits(1 << 10))),
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
