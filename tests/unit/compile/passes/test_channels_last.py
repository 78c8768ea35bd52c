"""A channels_last weight is gathered as it lies in memory and permuted; casts are found behind that all the same."""

import torch

from lightning_zero.compile.fx_utils import gathers
from lightning_zero.compile.passes.prepare import fuse_casts
from lightning_zero.compile.passes.reduce_groups import enqueue_gradients
from tests.unit.compile.graphs import Builder, order

aten = torch.ops.aten
BF16 = torch.bfloat16


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


def test_its_gradient_is_handed_over_in_the_dtype_it_was_computed_in() -> None:
    b = Builder()
    grad = b.input("grad", 8, 4, 3, 3, dtype=BF16)
    wide = b.call(aten._to_copy.default, grad, dtype=torch.float32)
    stored = b.call(aten.permute.default, wide, [0, 2, 3, 1])
    graph = enqueue_gradients(b.done(b.reduce(stored, b.shard("w"))))
    graph.lint()
    assert order(graph) == "permute reduce_add(w)"
    (node,) = graph.find_nodes(op="call_function", target=torch.ops.lightning_zero.reduce_add.default)
    assert node.args[0].args[0] is grad
    assert node.args[0].meta["val"].dtype is BF16
