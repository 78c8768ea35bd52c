"""What a forward graph must not save for its backward: gathered weights, and every view and cast of one."""

import torch
from torch._functorch.compile_utils import fx_graph_cse
from torch.fx import GraphModule
from torch.utils.checkpoint import CheckpointPolicy

from lightning_zero.compile.fx_utils import reduces
from lightning_zero.compile.partitioner.partition import tag_gathers
from lightning_zero.compile.passes.reduce_groups import enqueue_gradients
from tests.unit.compile.graphs import Builder

aten = torch.ops.aten
MUST = CheckpointPolicy.MUST_RECOMPUTE


def tagged(graph: torch.fx.Graph) -> list[str]:
    return [node.name for node in tag_gathers(graph).nodes if node.meta.get("recompute") is MUST]


def test_a_gather_and_all_views_and_casts_of_it_are_recomputed_and_nothing_else() -> None:
    b = Builder()
    shard, x = b.shard("shard"), b.input("x", 8, 5)
    weight = b.gather(shard, 6, 5)
    narrow = b.call(aten._to_copy.default, weight, dtype=torch.bfloat16)
    flipped = b.call(aten.t.default, narrow)
    part = b.call(aten.slice.Tensor, flipped, 1, 0, 3)
    converted = b.call(torch.ops.prims.convert_element_type.default, weight, torch.float64)
    used = b.call(aten.mm.default, b.call(aten._to_copy.default, x, dtype=torch.bfloat16), flipped)
    view_of_used = b.call(aten.view.default, used, [48])
    graph = b.done(used, part, converted, view_of_used, b.call(aten.mul.Tensor, weight, 2.0))
    assert tagged(graph) == [
        "gather_default",
        "_to_copy_default",
        "t_default",
        "slice_tensor",
        "convert_element_type_default",
    ]


def test_a_weight_that_is_only_the_second_input_of_a_view_op_tags_nothing() -> None:
    b = Builder()
    shard, x = b.shard("shard"), b.input("x", 6, 5)
    weight = b.gather(shard, 6, 5)
    graph = b.done(b.call(aten.expand_as.default, x, weight))
    assert tagged(graph) == ["gather_default"]


def test_regions_of_activation_checkpointing_keep_their_numbers() -> None:
    b = Builder()
    shard, x = b.shard("shard"), b.input("x", 8, 5)
    first = b.call(aten.relu.default, x)
    inside, last = b.call(aten.tanh.default, first), b.call(aten.tanh.default, first)
    for node in (first, inside, last):
        node.meta |= {"ac_graph_id": 7, "recompute": CheckpointPolicy.PREFER_RECOMPUTE}
    graph = b.done(b.call(aten.mm.default, last, b.gather(shard, 5, 6)), inside)
    tag_gathers(graph)
    assert [node.meta["ac_graph_id"] for node in (first, inside, last)] == [7, 7, 7]
    assert first.meta["recompute"] is inside.meta["recompute"] is CheckpointPolicy.PREFER_RECOMPUTE
    assert last.meta["recompute"] is CheckpointPolicy.MUST_SAVE, "it is needed outside"
    # The partitioner honours tags only on nodes that have a number.
    assert all("ac_graph_id" in node.meta for node in graph.nodes if node.op == "call_function")


def test_a_graph_without_weights_is_left_alone() -> None:
    b = Builder()
    x = b.input("x", 3, 3)
    graph = b.done(b.call(aten.t.default, x))
    before = {node: dict(node.meta) for node in graph.nodes}
    assert tagged(graph) == []
    assert {node: dict(node.meta) for node in graph.nodes} == before


def test_gradients_are_handed_over_in_backward() -> None:
    b = Builder()
    shard, x = b.shard("shard"), b.input("x", 5, 6)
    weight = b.gather(shard, 5, 6)
    zeros = b.call(aten.zeros_like.default, x)  # depends on nothing that only backward has
    reduced = b.reduce(zeros, shard)
    tag_gathers(b.done(b.call(aten.mul.Tensor, x, weight), reduced))
    assert reduced.meta["partitioner_tag"] == "must_be_in_backward"


def test_the_partitioner_saves_no_weight() -> None:
    """The tag does what it is for: on a joint graph as AOTAutograd makes it, with stock min-cut."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    b = Builder()
    shard, x, tangent = b.shard("primals_1"), b.input("primals_2", 8, 5), b.input("tangents_1", 8, 6)
    narrow = b.call(aten._to_copy.default, b.gather(shard, 6, 5), dtype=torch.bfloat16)
    flipped = b.call(aten.t.default, narrow)
    low = b.call(aten._to_copy.default, x, dtype=torch.bfloat16)
    out = b.call(aten.mm.default, low, flipped)
    low_tangent = b.call(aten._to_copy.default, tangent, dtype=torch.bfloat16)
    grad_x = b.call(aten.mm.default, low_tangent, b.call(aten.t.default, flipped))
    grad_w = b.call(aten.mm.default, b.call(aten.t.default, low_tangent), low)
    joint = b.done(out, b.reduce(grad_w, shard), grad_x)
    mode = torch._subclasses.FakeTensorMode()
    for node in joint.nodes:
        if "val" in node.meta:
            with mode:
                node.meta["val"] = torch.empty(node.meta["val"].shape, dtype=node.meta["val"].dtype)
    tag_gathers(joint)
    inputs = [node.meta["val"] for node in joint.nodes if node.op == "placeholder"]
    forward, backward = min_cut_rematerialization_partition(GraphModule({}, joint), inputs, num_fwd_outputs=1)
    saved = next(iter(reversed(forward.graph.nodes))).args[0][1:]
    assert {node.name for node in saved} <= {"primals_1", "primals_2", "_to_copy_default_1"}, forward.graph
    assert any("gather" in str(node.target) for node in backward.graph.nodes), backward.graph


def test_equal_gradients_of_a_tied_weight_are_all_handed_over() -> None:
    """The partitioner makes equal calls one, and these are not the graph's outputs: their sum is."""
    b = Builder()
    shard, other, x = b.shard("shard"), b.shard("other"), b.input("x", 5, 6)
    weight = b.gather(shard, 5, 6)
    products = [b.call(aten.mul.Tensor, x, 2.0) for _ in range(3)]
    first, second, third = (b.reduce(product, shard) for product in products)
    total = b.call(aten.add.Tensor, b.call(aten.add.Tensor, first, second), third)
    joint = b.done(b.call(aten.mul.Tensor, x, weight), total, b.reduce(products[0], other))
    mode = torch._subclasses.FakeTensorMode()
    for node in joint.nodes:
        if "val" in node.meta:
            with mode:
                node.meta["val"] = torch.empty(node.meta["val"].shape, dtype=node.meta["val"].dtype)
    tag_gathers(joint)
    left = fx_graph_cse(joint)
    assert len(left.find_nodes(op="call_function", target=aten.mul.Tensor)) == 2, "nothing was eliminated"
    assert [node.args[1].name for node in reduces(left)] == ["shard", "shard", "shard", "other"]
    enqueue_gradients(left)
    handed = left.find_nodes(op="call_function", target=torch.ops.lightning_zero.reduce_add.default)
    assert [len(node.args) for node in handed] == [2] * 4
