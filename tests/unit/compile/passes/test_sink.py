import torch

from lightning_zero.compile.passes.prepare import sink_gathers
from tests.unit.compile.graphs import Builder, order

aten = torch.ops.aten


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
