"""Bytes that a graph takes at once, against sums by hand."""

from typing import Any

import torch

from lightning_zero.compile.budget_sweep.lifetimes import graph_peak
from lightning_zero.compile.context import GROUPS_PER_GRAPH, CompileConfig, PassContext
from lightning_zero.compile.passes.reduce_groups import enqueue_gradients
from tests.unit.compile.graphs import Builder

aten = torch.ops.aten
GRADIENT = 64 * 64 * 4


def products(count: int, then: int = 0) -> torch.fx.Graph:
    """Of one pair of inputs, each a gradient that is returned; then ``then`` more, none of which lives on."""
    b = Builder()
    x, y = b.input("x", 64, 64), b.input("y", 64, 64)
    gradients = [b.call(aten.mm.default, x, y) for _ in range(count)]
    z = x
    for _ in range(then):
        z = b.call(aten.mm.default, z, y)
    return b.done(*gradients, z)


def peak(graph: torch.fx.Graph, gradients: int, reduce_group_mb: float = 1000.0) -> float:
    """In gradients."""
    context = PassContext(CompileConfig(reduce_group_mb=reduce_group_mb), 2)
    return graph_peak(graph, context, set(), gradients, fuses=True) / GRADIENT


def test_gradients_of_weights_leave_in_groups_and_do_not_wait_for_the_end() -> None:
    several = 4 * GROUPS_PER_GRAPH
    assert peak(products(several), several) == 4
    assert peak(products(several), several, reduce_group_mb=2 * GRADIENT / 2**20) == 2


def test_what_else_a_graph_returns_stays_to_its_end() -> None:
    several = 4 * GROUPS_PER_GRAPH
    assert peak(products(several), 0) == several
    assert peak(products(several), several // 2) == several // 2


def test_what_is_read_for_the_last_time_makes_room() -> None:
    graph = products(0, then=5)
    assert peak(graph, 0) == 2


def test_gradients_that_a_graph_hands_over_leave_as_those_do_that_it_returns() -> None:
    several = 4 * GROUPS_PER_GRAPH
    b = Builder()
    x, y = b.input("x", 64, 64), b.input("y", 64, 64)
    shards = [b.shard(f"primals_{number}") for number in range(several)]
    reduced = [b.reduce(b.call(aten.mm.default, x, y), shard) for shard in shards]
    graph = enqueue_gradients(b.done(*reduced))
    assert peak(graph, 0) == peak(products(several), several) == 4


def generated(saved: bool, **options: Any) -> float:
    """Of a graph that reads an input for the last time in code that is generated, in gradients."""
    b = Builder()
    x = b.input("x", 64, 64)
    graph = b.done(b.call(aten.mm.default, b.call(aten.neg.default, x), b.input("y", 64, 1)))
    context = PassContext(CompileConfig(**options), 2)
    return graph_peak(graph, context, {x} if saved else set(), 0, fuses=True) / GRADIENT


def test_what_a_piece_was_given_is_not_overwritten() -> None:
    """It goes with its last use, once that is over, and makes room for the product, a 64th of it."""
    assert generated(saved=False) == 1 + 1 / 64
    assert generated(saved=True) == 1
    assert generated(saved=True, whole_graphs=True) == 1 / 64


def test_what_nobody_but_generated_code_reads_is_not_written_though_it_reads_at_places_of_its_own() -> None:
    """As a loss does: the logarithm of one probability of each row."""
    b = Builder()
    x, places = b.input("x", 64, 64), b.input("places", 64, 1, dtype=torch.int64)
    wide = b.call(aten.exp.default, x)
    total = b.call(aten.sum.dim_IntList, wide, [1], True)
    chosen = b.call(aten.gather.default, b.call(aten.log.default, wide), 1, places)
    assert peak(b.done(b.call(aten.sub.Tensor, chosen, total)), 0) == 64 * 4 / GRADIENT
