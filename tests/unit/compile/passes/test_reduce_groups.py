"""Gradients that the executor sends without a copy: which, and until when."""

import torch
from torch.fx import Graph

from lightning_zero.compile.fx_utils import is_reduce, ops
from lightning_zero.compile.passes.reduce_groups import enqueue_gradients, group_reduces, zero_copy_gradients
from tests.unit.compile.graphs import Builder, order

aten = torch.ops.aten
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
