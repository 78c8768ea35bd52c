"""Passes on single gathers and reduces: shared, merged, sunk, cast and read in place."""

import operator

import pytest
import torch
from torch.fx import Graph, Node

from lightning_zero.compile.fx_utils import ON_HOST, REDUCE, InPlaceReads, gathers, ops
from lightning_zero.compile.passes.prepare import (
    cast_before_views,
    fuse_casts,
    merge_reduces,
    read_in_place,
    share_gathers,
    sink_gathers,
)
from lightning_zero.compile.passes.reduce_groups import enqueue_gradients, group_reduces
from lightning_zero.sharding.weight_format import DEQUANTIZE, packed_words
from tests.unit.compile.graphs import Builder, order

BF16 = torch.bfloat16


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


def read(b: Builder, x: Node, weight: Node, *more: Node, dtypes: tuple[torch.dtype, ...] = ()) -> str:
    graph = read_in_place(b.done(b.call(aten.mm.default, x, weight), *more), InPlaceReads(frozenset(dtypes)))
    graph.lint()
    return order(graph)


def test_whole_shards_are_read_in_place_without_their_padding() -> None:
    b = Builder()
    padded, full, x = b.shard("padded", 96), b.shard("full", 64), b.input("x", 8, 8)
    x = b.call(aten.mm.default, x, b.gather(padded, 8, 8))
    assert read(b, x, b.gather(full, 8, 8)) == "view slice view mm view view mm"
    views = b.graph.find_nodes(op="call_function", target=aten.view.default)
    for shard in (padded, full):
        assert any(shard.meta["val"].untyped_storage() is view.meta["val"].untyped_storage() for view in views)


@pytest.mark.parametrize("kept", [(), (BF16,)])
def test_a_weight_in_a_dtype_is_read_from_its_copy_if_the_executor_keeps_one(kept: tuple[torch.dtype, ...]) -> None:
    b = Builder()
    x, weight = b.input("x", 8, 8, dtype=BF16), b.gather(b.shard("a", 64), 8, 8, dtype=BF16)
    assert read(b, x, weight, dtypes=kept) == ("weight_view(a) mm" if kept else "gather(a) mm")


def test_a_weight_in_parts_is_read_in_place() -> None:
    b = Builder()
    parts = b.call(aten.split.Tensor, b.gather(b.shard("w"), 8, 4), 4)
    used = [b.call(aten.sin.default, b.call(operator.getitem, parts, index)) for index in range(2)]
    graph = read_in_place(b.done(*used), InPlaceReads(frozenset()))
    graph.lint()
    assert not gathers(graph)


def test_weights_in_the_cache_are_not_read_in_place() -> None:
    b = Builder()
    x, shard, cache = b.input("x", 8, 8), b.shard("a", 64), b.input("cache", 8, 8)
    weight = b.gather(shard, 8, 8)
    weight.args = (*weight.args, cache)
    assert read(b, x, weight) == "gather(a, cache) mm"


@pytest.mark.parametrize(("dtype", "read_as"), [(torch.float32, "gather(a) mm"), (BF16, "weight_view(a) mm")])
def test_a_shard_on_the_host_is_read_only_from_its_copy_on_the_device(dtype: torch.dtype, read_as: str) -> None:
    b = Builder()
    x, weight = b.input("x", 8, 8, dtype=dtype), b.gather(b.shard("a", 64), 8, 8, dtype=dtype)
    weight.meta["custom"] = {ON_HOST: True}
    assert read(b, x, weight, dtypes=(BF16,)) == read_as


def test_a_weight_that_the_graph_returns_is_copied() -> None:
    for returned in (lambda b, w: w, lambda b, w: b.call(aten.t.default, w)):
        b = Builder()
        x, weight = b.input("x", 8, 8), b.gather(b.shard("a", 64), 8, 8)
        assert read(b, x, weight, returned(b, weight)).startswith("gather(a)")


def test_a_weight_in_the_shape_of_its_shard_is_no_view_of_the_parameter_unless_it_is_packed() -> None:
    b = Builder()
    x, weight = b.input("x", 8, 8), b.gather(b.shard("a", 64), 8, 8)
    row = b.call(aten.mm.default, b.call(aten.view.default, weight, [1, 64]), b.input("y", 64, 8))
    assert read(b, x, weight, row).startswith("weight_view(a)")
    b = Builder()
    shard, x = b.shard("a", 64, dtype=torch.int32), b.input("x", 8, 8)
    packed = b.gather(shard, 1, 64)
    assert read(b, x, x, b.call(DEQUANTIZE, packed, [8, 8], torch.float32, "int8")) == "view view dequantize() mm"


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


def test_gathers_move_to_their_first_use_with_their_views() -> None:
    b = Builder()
    v, w, x = b.shard("v"), b.shard("w"), b.input("x", 8, 8)
    late = b.call(aten.t.default, b.gather(w, 8, 8))
    early = b.gather(v, 8, 8)
    first = b.call(aten.mm.default, x, early)
    second = b.call(aten.mm.default, first, late)
    assert order(b.graph) == "gather(w) t gather(v) mm mm"
    graph = sink_gathers(b.done(second))
    graph.lint()
    assert order(graph) == "gather(v) mm gather(w) t mm"


def test_dequantization_by_a_saved_number_moves_with_the_gather() -> None:
    b = Builder()
    w, factor, x = b.shard("w", dtype=torch.int32), b.input("factor"), b.input("x", 8, 8)
    words = packed_words(8, 8, "nf4")
    late = b.call(DEQUANTIZE, b.gather(w, words), [8, 8], torch.float32, "nf4", factor, True)
    graph = sink_gathers(b.done(b.call(aten.mm.default, b.call(aten.sin.default, x), late)))
    graph.lint()
    assert order(graph) == "sin gather(w) dequantize(factor) mm"


def test_the_first_of_several_uses_counts() -> None:
    b = Builder()
    w, x = b.shard("w"), b.input("x", 8, 8)
    whole = b.gather(w, 8, 8)
    busy = b.call(aten.sin.default, x)
    first = b.call(aten.mm.default, busy, whole)
    second = b.call(aten.mm.default, first, b.call(aten.t.default, whole))
    graph = sink_gathers(b.done(second))
    graph.lint()
    assert order(graph) == "sin gather(w) mm t mm"


def test_a_weight_that_is_returned_stays_before_the_output() -> None:
    b = Builder()
    w, x = b.shard("w"), b.input("x", 8, 8)
    whole = b.gather(w, 8, 8)
    graph = sink_gathers(b.done(whole, b.call(aten.sin.default, x)))
    graph.lint()
    assert order(graph) == "sin gather(w)"


def test_a_weight_that_is_only_used_in_low_precision_is_gathered_in_it() -> None:
    b = Builder()
    w, x = b.shard("w"), b.input("x", 4, 8, dtype=BF16)
    cast = b.call(aten._to_copy.default, b.gather(w, 8, 8), dtype=BF16)
    graph = fuse_casts(b.done(b.call(aten.mm.default, x, cast)))
    graph.lint()
    assert order(graph) == "gather(w) mm"
    (node,) = gathers(graph)
    assert node.args[2] is BF16
    assert node.meta["val"].dtype is BF16


def test_inductors_form_of_a_cast_counts_too() -> None:
    b = Builder()
    w, x = b.shard("w"), b.input("x", 4, 8, dtype=BF16)
    cast = b.call(torch.ops.prims.convert_element_type.default, b.gather(w, 8, 8), BF16)
    graph = fuse_casts(b.done(b.call(aten.mm.default, x, cast)))
    assert order(graph) == "gather(w) mm"


def test_a_weight_used_in_both_dtypes_is_gathered_in_both() -> None:
    b = Builder()
    w, x, i = b.shard("w"), b.input("x", 4, 8, dtype=BF16), b.input("i", 4, dtype=torch.long)
    whole = b.gather(w, 8, 8)
    looked_up = b.call(aten.embedding.default, whole, i)
    graph = fuse_casts(b.done(looked_up, b.call(aten.mm.default, x, b.call(aten._to_copy.default, whole, dtype=BF16))))
    assert sorted(str(node.args[2]) for node in gathers(graph)) == ["torch.bfloat16", "torch.float32"]
    assert looked_up.args[0].args[2] is torch.float32


def test_two_casts_share_one_gather() -> None:
    b = Builder()
    w, x = b.shard("w"), b.input("x", 8, 8, dtype=BF16)
    whole = b.gather(w, 8, 8)
    products = [b.call(aten.mm.default, x, b.call(aten._to_copy.default, whole, dtype=BF16)) for _ in range(2)]
    assert order(fuse_casts(b.done(*products))) == "gather(w) mm mm"


def test_a_cast_to_a_wider_dtype_stays() -> None:
    b = Builder()
    w = b.shard("w", dtype=BF16)
    cast = b.call(aten._to_copy.default, b.gather(w, 8, 8), dtype=torch.float32)
    graph = fuse_casts(b.done(b.call(aten.sin.default, cast)))
    assert order(graph) == "gather(w) _to_copy sin"


def test_a_move_to_another_device_is_no_cast() -> None:
    b = Builder()
    w = b.shard("w")
    there = {"dtype": BF16, "device": torch.device("cpu")}
    moved = b.graph.call_function(aten._to_copy.default, (b.gather(w, 8, 8),), there)
    moved.meta["val"] = torch.empty(8, 8, dtype=BF16)
    assert order(fuse_casts(b.done(moved))) == "gather(w) _to_copy"


def test_a_permuted_weight_is_gathered_in_the_dtype_it_is_used_in() -> None:
    b = Builder()
    weight = b.call(aten.permute.default, b.gather(b.shard("w"), 8, 3, 3, 4), [0, 3, 1, 2])
    cast = b.call(aten._to_copy.default, weight, dtype=BF16)
    used = b.call(aten.sin.default, cast)
    graph = fuse_casts(b.done(used, b.call(aten.cos.default, weight)))
    graph.lint()
    assert sorted(str(node.args[2]) for node in gathers(graph)) == ["torch.bfloat16", "torch.float32"]
    low = used.args[0]
    assert low.target is aten.permute.default
    assert low.meta["val"].dtype is low.args[0].meta["val"].dtype is BF16
    assert low.meta["val"].stride() == cast.meta["val"].stride() == weight.meta["val"].stride()


def test_a_transposed_weight_is_kept_for_backward_in_the_dtype_it_is_used_in() -> None:
    b = Builder()
    turned = b.call(aten.transpose.int, b.gather(b.shard("w"), 3, 8, 4), -2, -1)
    part = b.call(aten.select.int, turned, 0, 1)
    used = b.call(aten.sin.default, b.call(aten._to_copy.default, part, dtype=BF16))
    graph = cast_before_views(b.done(used))
    graph.lint()
    assert order(graph) == "gather(w) _to_copy transpose select sin"
    assert used.args[0].meta["val"].stride() == (1, 4)
    assert used.args[0].meta["val"].dtype is BF16


def test_a_view_that_is_widened_stays() -> None:
    b = Builder()
    turned = b.call(aten.transpose.int, b.gather(b.shard("w"), 8, 4), -2, -1)
    graph = cast_before_views(b.done(b.call(aten._to_copy.default, turned, dtype=torch.float64)))
    assert order(graph) == "gather(w) transpose _to_copy"


def test_its_gradient_is_handed_over_in_the_dtype_it_was_computed_in() -> None:
    b = Builder()
    grad = b.input("grad", 8, 4, 3, 3, dtype=BF16)
    wide = b.call(aten._to_copy.default, grad, dtype=torch.float32)
    stored = b.call(aten.transpose.int, b.call(aten.permute.default, wide, [0, 2, 3, 1]), 1, 2)
    graph = enqueue_gradients(b.done(b.reduce(stored, b.shard("w"))))
    graph.lint()
    assert order(graph) == "permute transpose reduce_add(w)"
    (node,) = graph.find_nodes(op="call_function", target=torch.ops.lightning_zero.reduce_add.default)
    assert node.args[0].args[0].args[0] is grad
    assert node.args[0].meta["val"].dtype is BF16
