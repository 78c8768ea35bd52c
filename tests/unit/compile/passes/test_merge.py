"""Uses of one weight that lie close together are served by one gather and one gradient."""

import torch
from torch.fx import Graph

from lightning_zero.compile.fx_utils import REDUCE, ops
from lightning_zero.compile.passes.prepare import merge_reduces, share_gathers
from lightning_zero.compile.passes.reduce_groups import enqueue_gradients, group_reduces
from tests.unit.compile.graphs import Builder, order

aten = torch.ops.aten
WEIGHT = 8 * 8 * 4  # bytes of each weight below


def uses(names: str) -> Graph:
    """x @ a @ b @ ..., a gather before each product, a name for each shard."""
    b = Builder()
    shards = {name: b.shard(name, 64) for name in sorted(set(names))}
    x = b.input("x", 8, 8)
    for name in names:
        x = b.call(aten.mm.default, x, b.gather(shards[name], 8, 8))
    return b.done(x)


def shared(names: str, within: int, small: int = 0) -> str:
    graph = share_gathers(uses(names), within, small)
    graph.lint()
    return order(graph)


def test_a_weight_that_is_used_again_soon_is_gathered_once() -> None:
    assert shared("aab", 0) == "gather(a) mm mm gather(b) mm"
    assert shared("aba", WEIGHT) == "gather(a) mm gather(b) mm mm"


def test_a_weight_that_is_used_again_much_later_is_gathered_again() -> None:
    assert shared("abca", WEIGHT) == "gather(a) mm gather(b) mm gather(c) mm gather(a) mm"


def test_the_distance_counts_from_the_last_use() -> None:
    assert shared("abaca", WEIGHT) == "gather(a) mm gather(b) mm mm gather(c) mm mm"


def test_small_weights_are_shared_however_far_apart() -> None:
    assert shared("abca", 0, small=WEIGHT) == "gather(a) mm gather(b) mm gather(c) mm mm"


def test_each_dtype_is_gathered() -> None:
    b = Builder()
    shard, x, y = b.shard("a", 64), b.input("x", 8, 8), b.input("y", 8, 8, dtype=torch.bfloat16)
    wide = b.call(aten.mm.default, x, b.gather(shard, 8, 8))
    narrow = b.call(aten.mm.default, y, b.gather(shard, 8, 8, dtype=torch.bfloat16))
    assert order(share_gathers(b.done(wide, narrow), 10**6, 0)) == "gather(a) mm gather(a) mm"


def gradients(names: str, *dtypes: torch.dtype) -> Graph:
    b = Builder()
    shards = {name: b.shard(name, 64) for name in sorted(set(names))}
    kinds = dtypes or (torch.float32,) * len(names)
    inputs = [b.input(f"g{i}", 8, 8, dtype=dtype) for i, dtype in enumerate(kinds)]
    return b.done(*[b.reduce(b.call(aten.neg.default, g), shards[n]) for g, n in zip(inputs, names, strict=True)])


def test_two_gradients_of_one_weight_in_a_row_are_added_up() -> None:
    graph = merge_reduces(gradients("aa"))
    graph.lint()
    assert order(graph) == "neg neg add reduce(a)"
    (reduce,) = graph.find_nodes(op="call_function", target=ops(REDUCE))
    outputs = next(iter(reversed(graph.nodes))).args[0]
    assert outputs == (reduce, reduce)
    assert order(enqueue_gradients(graph)) == "neg neg add reduce_add(a)"


def test_three_in_a_row_are_one() -> None:
    assert order(merge_reduces(gradients("aaab"))).count("reduce(a)") == 1


def test_gradients_with_others_in_between_are_not_held_back() -> None:
    assert order(merge_reduces(gradients("aba"))) == "neg reduce(a) neg reduce(b) neg reduce(a)"


def test_gradients_of_different_dtypes_stay_apart() -> None:
    graph = merge_reduces(gradients("aa", torch.float32, torch.bfloat16))
    assert order(graph) == "neg reduce(a) neg reduce(a)"


def test_a_gradient_that_is_used_before_the_second_is_there_stays() -> None:
    b = Builder()
    shard, g = b.shard("a", 64), b.input("g", 8, 8)
    first = b.reduce(g, shard)
    used = b.call(aten.detach.default, first)
    graph = b.done(used, b.reduce(g, shard))
    assert order(merge_reduces(graph)) == "reduce(g, a) detach reduce(g, a)"


def grouped(names: str, group_bytes: int, parts: int = 1) -> str:
    graph = group_reduces(enqueue_gradients(gradients(names)), group_bytes, parts)
    graph.lint()
    graph.eliminate_dead_code()
    return order(graph)


def test_gradients_are_handed_over_together_up_to_a_limit() -> None:
    assert grouped("abcd", 2 * WEIGHT) == "neg neg reduce_group(a, b) neg neg reduce_group(c, d)"
    assert grouped("abc", 2 * WEIGHT) == "neg neg reduce_group(a, b) neg reduce_add(c)"
    assert grouped("abcd", 100 * WEIGHT, parts=2) == "neg neg reduce_group(a, b) neg neg reduce_group(c, d)"
    assert grouped("ab", WEIGHT - 1) == "neg reduce_add(a) neg reduce_add(b)"
