"""Peak memory of compiled graphs."""

from __future__ import annotations

from typing import Any

import torch

from lightning_zero.compile.context import GROUPS_PER_GRAPH, CompileConfig, PassContext
from lightning_zero.compile.passes.pipeline import FIRST_GROUPS
from lightning_zero.compile.passes.reduce_groups import enqueue_gradients
from lightning_zero.planning.graph_memory import Span, graph_peak, host_activations, weight_spans
from tests.unit.compile import graphs
from tests.unit.compile.graphs import WEIGHT, Builder

aten = torch.ops.aten
GRADIENT = 64 * 64 * 4


def products(count: int, then: int = 0) -> torch.fx.Graph:
    """Return a graph of ``count`` gradients, followed by ``then`` products of which one is kept."""
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
    """Return the peak of a graph whose generated code reads an input last, in gradients."""
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


LETTERS = "abcdefghijklmnopqrstuvwxyz"[: 2 * GROUPS_PER_GRAPH]


def context(**options: float) -> PassContext:
    return PassContext(CompileConfig(**options), 2)  # type: ignore[arg-type]


def test_small_weights_are_there_from_the_beginning() -> None:
    graph = graphs.products("ab")
    nodes = list(graph.nodes)
    uses = [nodes.index(node) for node in nodes if node.target is aten.mm.default]
    assert weight_spans(graph, context()) == [Span(WEIGHT, 0, use) for use in uses]


def test_a_group_of_large_ones_comes_with_the_first_use_of_the_one_before() -> None:
    graph = graphs.products(LETTERS)
    nodes = list(graph.nodes)
    uses = [nodes.index(node) for node in nodes if node.target is aten.mm.default]
    found = weight_spans(graph, context(prefetch=False, gather_group_mb=WEIGHT / 2**20))
    assert [stay.end for stay in found] == uses
    assert {stay.nbytes for stay in found} == {WEIGHT}
    begins = [stay.begin for stay in found]
    assert begins == sorted(begins)
    assert begins[0] == begins[1] == uses[0]  # the first group is started where it is used: nothing is before it
    assert len(FIRST_GROUPS) > 0
    assert all(begin in uses and begin <= use for begin, use in zip(begins, uses, strict=True))
    assert all(begin < use for begin, use in zip(begins[1:], uses[1:], strict=True))


def test_a_weight_that_is_returned_stays_to_the_end() -> None:
    b = Builder()
    shard, x = b.shard("a", 2048), b.input("x", 64, 64)
    whole = b.gather(shard, 64, 64)
    graph = b.done(b.call(aten.mm.default, x, whole), whole)
    assert [stay.end for stay in weight_spans(graph, context())] == [len(graph.nodes) - 1]


def test_nothing_lies_on_the_host_by_itself() -> None:
    assert host_activations(graphs.products("ab")) == set()
