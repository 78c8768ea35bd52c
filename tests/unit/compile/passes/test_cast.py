import torch

from lightning_zero.compile.fx_utils import gathers
from lightning_zero.compile.passes.prepare import fuse_casts
from tests.unit.compile.graphs import Builder, order

aten = torch.ops.aten
BF16 = torch.bfloat16


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
