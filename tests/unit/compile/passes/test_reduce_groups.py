"""Gradients that the executor sends without a copy: which, and until when."""

import re

import torch
from torch.fx import Graph

from lightning_zero.compile.fx_utils import InPlaceReads, is_reduce, ops, shard_of
from lightning_zero.compile.passes.prepare import read_in_place
from lightning_zero.compile.passes.reduce_groups import (
    enqueue_gradients,
    group_reduces,
    reduce_after_reads,
    zero_copy_gradients,
)
from tests.unit.compile.graphs import Builder, order

aten = torch.ops.aten
BF16 = torch.bfloat16
WEIGHT = 4 * 64


def products(names: str) -> Graph:
    """A product with an enqueued gradient for each name; for capital letters the gradient is no product."""
    b = Builder()
    shards = {name: b.shard(name.lower(), 64) for name in names}
    left, right = b.input("x", 8, 4), b.input("y", 4, 8)
    handed = []
    for name in names:
        product = b.call(aten.mm.default, left, right)
        grad = product if name.islower() else b.call(aten.neg.default, product)
        handed.append(b.reduce(grad, shards[name]))
    return enqueue_gradients(b.done(*handed))


def borrowed(names: str, in_flight: int = 2) -> str:
    graph = zero_copy_gradients(group_reduces(products(names), WEIGHT, 1), in_flight)
    graph.lint()
    graph.eliminate_dead_code()
    return order(graph)


def test_gradients_are_released_when_later_ones_have_been_handed_over_or_at_the_end() -> None:
    assert borrowed("abc") == (
        "mm reduce_zero_copy(a) mm reduce_zero_copy(b) mm reduce_release(a) reduce_zero_copy(c) reduce_release(b) reduce_release(c)"
    )
    assert (
        borrowed("ab", in_flight=1)
        == "mm reduce_zero_copy(a) mm reduce_release(a) reduce_zero_copy(b) reduce_release(b)"
    )
    assert borrowed("a") == "mm reduce_zero_copy(a) reduce_release(a)"


def test_what_may_be_computed_anew_for_each_use_is_copied() -> None:
    assert borrowed("A") == "mm neg reduce_add(a)"
    assert borrowed("aB") == "mm reduce_zero_copy(a) mm neg reduce_add(b) reduce_release(a)"


def test_a_group_says_which_of_its_gradients_are_held() -> None:
    graph = zero_copy_gradients(group_reduces(products("aBc"), 3 * WEIGHT, 1))
    (node,) = filter(is_reduce, graph.nodes)
    assert node.target is ops("reduce_zero_copy")
    assert node.args[2] == [1, 0, 1]
    (release,) = graph.find_nodes(op="call_function", target=ops("reduce_release"))
    assert release.args[0] == [node.args[0][0], node.args[0][2]]
    assert node.meta["weights"] == ("a", "b", "c")


def test_a_view_of_a_product_is_held_too() -> None:
    b = Builder()
    shard = b.shard("a", 64)
    product = b.call(aten.mm.default, b.input("x", 8, 4), b.input("y", 4, 8))
    turned = b.call(aten.permute.default, product, [1, 0])
    graph = zero_copy_gradients(enqueue_gradients(b.done(b.reduce(turned, shard))))
    assert order(graph) == "mm permute reduce_zero_copy(a) reduce_release(a)"


def read_late(*calls: str, groups: int = 0) -> Graph:
    """Weights in bfloat16 that a graph reads, "a", and whose gradients it enqueues, "+a", in this order."""
    b = Builder()
    names = sorted({call.lstrip("+") for call in calls})
    shards = {name: b.shard(name, 64) for name in names}
    x, handed = b.input("x", 8, 8, dtype=BF16), []
    weights = {name: b.gather(shards[name], 8, 8, dtype=BF16) for name in names if name in calls}
    for call in calls:
        x = b.call(aten.mm.default, x, x if call.startswith("+") else b.call(aten.t.default, weights[call]))
        if call.startswith("+"):
            handed.append(b.reduce(x, shards[call[1:]]))
    graph = read_in_place(enqueue_gradients(b.done(x, *handed)), InPlaceReads(frozenset({BF16})))
    graph = reduce_after_reads(group_reduces(graph, groups, 1) if groups else graph)
    graph.lint()
    return graph


def ordered(graph: Graph) -> str:
    return " ".join(re.findall(r"mm|reduce\w*\([^)]*\)", order(graph)))


def test_reads_end_right_before_the_gradient() -> None:
    nodes = list(read_late("+a", "a").nodes)
    [end], [reduce] = (
        [node for node in nodes if node.target is ops(name)] for name in ("end_reads", "reduce_after_reads")
    )
    assert nodes.index(reduce) == nodes.index(end) + 1
    assert end.args[0] == reduce.args[2]
    assert [view.target for view in end.args[0]] == [ops("weight_view")]


def test_gradients_follow_the_last_read_of_their_weights() -> None:
    """They may use the memory of the copies that the graph reads."""
    assert ordered(read_late("a", "+a")) == "mm mm reduce_after_reads(a)"
    assert ordered(read_late("+a", "a", "a")) == "mm mm mm reduce_after_reads(a)"
    assert ordered(read_late("+a", "+b", "a", "b", "b")) == "mm mm mm reduce_after_reads(a) mm mm reduce_after_reads(b)"
    assert ordered(read_late("+a", "+a", "a")) == "mm mm mm reduce_after_reads(a) reduce_after_reads(a)"


def test_gradients_of_weights_that_the_graph_does_not_read_stay_in_place() -> None:
    assert ordered(read_late("+a", "b", "+b", "b")) == "mm reduce_add(a) mm mm mm reduce_after_reads(b)"


def test_a_group_of_gradients_follows_the_reads_of_all_its_weights_and_is_borrowed() -> None:
    graph = read_late("+a", "+b", "b", "+c", "a", groups=2 * 64 * 2)
    assert ordered(graph) == "mm mm mm mm reduce_add(c) mm reduce_after_reads(a, b)"
    (node,) = graph.find_nodes(op="call_function", target=ops("reduce_after_reads"))
    read = node.args[2]
    graph = zero_copy_gradients(graph)
    (node,) = (n for n in graph.find_nodes(op="call_function", target=ops("reduce_zero_copy")) if len(n.args[0]) == 2)
    assert node.args[3] == read
    assert [shard_of(view).name for view in read] == ["a", "b"]
